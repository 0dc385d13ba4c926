"""What each `sixbit` command does with its arguments. Heavy modules are imported when a command runs."""

from __future__ import annotations

import importlib.util
import json
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import InputError
from .stopping import leaving_at_once

if TYPE_CHECKING:
    from .settings import Choice

OnProgress = Callable[[str, int, int], None]
CORE = ("torch", "numpy", "safetensors")
ENGINE = (*CORE, "PIL", "diffusers", "transformers", "rich")


def run_generate(given: Namespace) -> None:
    """`sixbit generate`."""
    with leaving_at_once():
        need(*ENGINE)
        choice = read_choice(given)
        quiet_libraries()
        from .generate import GenerateRequest, generate

    request = GenerateRequest(
        model=given.model,
        prompt=given.prompt,
        out=Path(given.out),
        choice=choice,
        pipeline=_path(given.pipeline),
        negative=given.negative,
        image=_path(given.image),
        steps=given.steps,
        cfg=given.cfg,
        seed=given.seed,
        size=given.size,
        frames=given.frames,
        compare=given.compare,
        device=given.device,
        report=_path(given.report),
        command=given.command_line,
    )
    with progress_bars() as progress:
        result = generate(request, progress, say)
    say(result.line)


def run_quantize(given: Namespace) -> None:
    """`sixbit quantize`."""
    with leaving_at_once():
        need(*CORE, "rich")
        from ..sixbit_core.checkpoint import open_checkpoint
        from ..sixbit_core.quantize import QuantizeConfig, quantize_checkpoint
        from ..sixbit_core.sample_inputs import SampleInputs
        from .facts import named_source

    try:
        calibrated = given.calibration is not None
        config = QuantizeConfig(given.method, given.rotation, given.compatible, given.force, calibrated)
    except ValueError as error:
        raise InputError(str(error)) from error
    source, inputs, errors = named_source(given.source), None, None
    if calibrated:
        if config.method != "gptq" and (given.rotation != "auto" or given.compatible):
            raise InputError(
                "--calibration serves --method gptq, or --rotation auto where layers may rotate; leave it out"
            )
        inputs, errors = SampleInputs(Path(given.calibration), open_checkpoint(source)), {}
    with progress_bars() as progress:

        def on_bytes(done: int, total: int, name: str) -> None:
            progress("quantize", done, total)

        made = quantize_checkpoint(source, Path(given.target), config, on_bytes, inputs, errors=errors)
    for line in error_lines(errors or {}):
        say(line)
    ratio = made.source_bytes / made.target_bytes
    say(
        f"{made.target}: {made.family}, {made.layers} layers in NVFP4 ({made.rotated} rotated), "
        f"{made.target_bytes / 1e6:.1f} MB, {ratio:.2f}x smaller, {made.seconds:.1f} s"
    )


def error_lines(errors: Mapping[str, float]) -> list[str]:
    """Output errors by layer in percent, a line for what stands together ("blocks.3", "norm_out")."""
    parts: dict[str, list[str]] = {}
    for layer, error in errors.items():
        words = layer.split(".")
        count = 2 if words[1].isdecimal() else 1
        parts.setdefault(".".join(words[:count]), []).append(f"{'.'.join(words[count:])} {100 * error:.2f}")
    return [f"{place}: output error in %: {', '.join(found)}" for place, found in parts.items()]


def run_calibrate(given: Namespace) -> None:
    """`sixbit calibrate`."""
    with leaving_at_once():
        need(*ENGINE)
        quiet_libraries()
        from .calibrate import CalibrateRequest, calibrate

    request = CalibrateRequest(
        model=given.model,
        out=Path(given.out),
        pipeline=_path(given.pipeline),
        prompts=given.prompts,
        steps=given.steps,
        cfg=given.cfg,
        seed=given.seed,
        size=given.size,
        frames=given.frames,
        bits=given.bits,
        inputs=_path(given.inputs),
        device=given.device,
    )
    with progress_bars() as progress:
        calibrate(request, progress, say)


def run_inspect(given: Namespace) -> None:
    """`sixbit inspect`."""
    with leaving_at_once():
        need(*CORE)
        from ..sixbit_core.inspect import format_inspection, inspect_checkpoint
        from .facts import named_source

    found = inspect_checkpoint(named_source(given.file))
    print(json.dumps(found, indent=1) if given.json else format_inspection(found))


def run_evaluate(given: Namespace) -> None:
    """`sixbit evaluate`."""
    with leaving_at_once():
        need(*ENGINE)
        choice = read_choice(given)
        quiet_libraries()
        from .evaluate import EvaluateRequest, evaluate

    request = EvaluateRequest(
        model=given.model,
        out=Path(given.out),
        choice=choice,
        pipeline=_path(given.pipeline),
        prompts=given.prompts,
        seeds=given.seeds,
        steps=given.steps,
        cfg=given.cfg,
        size=given.size,
        frames=given.frames,
        against_full=given.against_full,
        workers=given.workers,
        shard=given.shard,
        device=given.device,
        command=given.command_line,
    )
    with progress_bars(silent=given.shard is not None) as progress:
        result = evaluate(request, progress, say)
    if result is not None:
        show_summary(result["summary"])
        say(f"{given.out}: {result['summary']['clips']} clips")


def run_verify(given: Namespace) -> None:
    """`sixbit verify`."""
    with leaving_at_once():
        need(*ENGINE)
        quiet_libraries()
        from .verify import VerifyRequest, verify

    request = VerifyRequest(
        model=given.model,
        out=Path(given.out),
        pipeline=_path(given.pipeline),
        prompts=given.prompts,
        steps=given.steps,
        cfg=given.cfg,
        seed=given.seed,
        size=given.size,
        frames=given.frames,
        device=given.device,
        force=given.force,
        command=given.command_line,
    )
    with progress_bars() as progress:
        verify(request, progress, say)
    say(
        f"{request.out / 'verify.json'} and {request.out / 'verify.png'} are written; attach both to a report"
    )


def run_check(given: Namespace) -> None:
    """`sixbit check`."""
    with leaving_at_once():
        need(*CORE)
        choice = read_choice(given)
        if is_there("diffusers") and is_there("transformers"):
            quiet_libraries()
        from .check import check

    for line in check(given.model, _path(given.pipeline), choice, given):
        print(line)


def need(*libraries: str) -> None:
    """Raise InputError, before any of them is imported, where one is not installed."""
    missing = [name for name in libraries if not is_there(name)]
    if missing:
        raise InputError(f'this needs {", ".join(missing)}: pip install "sixbit-diffusion[engine]"')


def is_there(library: str) -> bool:
    """Whether a library is installed."""
    return importlib.util.find_spec(library) is not None


def read_choice(given: Namespace) -> Choice:
    """The run that was asked for, its names and numbers checked. Raises InputError."""
    from .settings import Choice, check_choice

    choice = Choice(
        precision=given.precision,
        cache=given.cache,
        preset=given.preset,
        router=given.router,
        bits=given.bits,
        predictor=_path(given.predictor),
        purified_refresh=False if given.no_pdr else None,
        tune=False if given.no_tuning else None,
        threshold=given.threshold,
        max_skips=given.max_skips,
        start=given.start,
        end=given.end,
        cache_location=given.cache_location,
    )
    check_choice(choice)
    return choice


def say(line: str) -> None:
    """One line for the reader."""
    print(line, flush=True)


@contextmanager
def progress_bars(silent: bool = False) -> Iterator[OnProgress]:
    """A function (what, done, in all) that draws one bar per `what`; draws nothing where nobody watches."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=silent or not console.is_terminal) as bars:
        tasks: dict[str, int] = {}

        def progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield progress


def show_summary(summary: dict[str, Any]) -> None:
    """What an evaluation found, as a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table("", "mean", "95 % interval")
    for name, found in summary.get("accuracy", {}).items():
        low, high = found["interval"]
        table.add_row(
            f"{name} right", f"{100 * found['share']:.1f} %", f"{100 * low:.1f} – {100 * high:.1f} %"
        )
    for name, found in summary.items():
        if isinstance(found, dict) and "mean" in found:
            low, high = found["interval"]
            table.add_row(name, f"{found['mean']:.3f}", f"{low:.3f} – {high:.3f}")
    table.add_row("seconds_per_clip", f"{summary['seconds_per_clip']:.2f}", "")
    Console().print(table)


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


def quiet_libraries() -> None:
    """Other libraries' notes stay off our one line; their errors still raise."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    diffusers_logging.set_verbosity_error()
    diffusers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
