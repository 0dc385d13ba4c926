"""`sixbit calibrate`: measure a model and write the predictor that its routers decide by.

First W4A8 runs without cache, one a caption, record Γ and the errors of both activation formats; then whole
runs solve θ for every asked-for bits, without and with the cache. The same call gives the same file.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..sixbit_core.calibrate import fit_predictor
from ..sixbit_core.calibration_run import BlockRecord, CalibrationRun, FullWeight, LinearRecord
from ..sixbit_core.config import PRESETS, DMPQConfig
from ..sixbit_core.predictor import Predictor
from ..sixbit_core.sample_inputs import FILE_NAME, write_inputs
from ..sixbit_core.thresholds import solve_thetas, trials
from .attach import block_linears
from .errors import InputError
from .facts import ModelFacts, check_clip, check_sampling, check_text_to_video, read_facts
from .files import check_target
from .machine import Machine, find_machine, synchronize
from .memory import check_memory
from .pipeline import LoadedModel, TextEmbeds, load_model
from .prompts import read_prompts
from .sample import ClipSpec, sample, sample_under
from .settings import RunSettings
from .transformer import FULL

DEFAULT_PROMPTS = 4
THETA_CLIPS = 2  # captions that each threshold is tried on: whole runs, so on a large model the longest part
RUNS_PER_THETA = 5  # of at most 8, for the forecast
MEASURING = 1.5  # times of a clip that is measured beside one that is only run
INPUT_CLIPS = 4  # that sample inputs are kept of: 0.36 GB each on the 5B at 50 steps
MIN_STEPS = 4  # three evaluations with a Γ before them make a line

OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class CalibrateRequest:
    """What `sixbit calibrate` was asked for; see the command line."""

    model: str
    out: Path
    pipeline: Path | None = None
    prompts: str | None = None
    steps: int = 50
    cfg: float = 6.0
    seed: int = 0
    size: tuple[int, int] | None = None
    frames: int | None = None
    bits: tuple[float, ...] = (5.0, 6.0, 7.0)
    inputs: Path | None = None
    device: str = "auto"


@dataclass(frozen=True)
class _Clips:
    """Captions, encoded, with what to sample from them."""

    specs: tuple[ClipSpec, ...]
    embeds: tuple[TextEmbeds, ...]


def calibrate(
    request: CalibrateRequest,
    progress: OnProgress = lambda *_: None,
    say: Callable[[str], None] = lambda _: None,
) -> Predictor:
    """Calibrate a model and write `request.out`.

    Raises:
        InputError: for what cannot be carried out, before weights load.
    """
    machine = find_machine(request.device)
    facts, specs = _checked(request, machine)
    model = load_model(request.model, request.pipeline, "search", machine, facts=facts)
    clips = _Clips(specs, tuple(model.encode(c.prompt, c.negative, c.guided) for c in specs))
    paper = not facts.checkpoint.is_quantized
    errors = ("excess", "paper") if paper else ("excess",)
    thresholds = len(trials(request.bits, errors))
    say(_forecast(model, clips, thresholds))
    kept: dict[str, list[torch.Tensor]] | None = None if request.inputs is None else {}
    records, blocks = record_errors(model, clips, full_weights(model) if paper else None, progress, say, kept)
    if kept is not None:
        rows = {name: torch.cat(parts) for name, parts in kept.items()}
        write_inputs(request.inputs, rows, facts.checkpoint.fingerprint)
    clip = specs[0]
    how = {
        "steps": clip.steps,
        "scheduler": "ddim-trailing",
        "cfg": clip.cfg,
        "size": list(clip.size),
        "frames": clip.frames,
        "seed": request.seed,
        "prompts": len(specs),
    }
    family, fingerprint = facts.family.name, facts.checkpoint.fingerprint
    try:
        predictor = fit_predictor(records, model.layout, family, fingerprint, how, blocks)
    except ValueError as error:
        raise InputError(str(error)) from error
    if paper:
        model.drop(FULL)
    run_once = _run_once(model, clips, predictor, _solving_clips(clips, thresholds), progress, say)
    solved = solve_thetas(predictor, records, run_once, request.bits, errors)
    solved.save(request.out)
    found, size = solved.summary(), f"{clip.size[0]}x{clip.size[1]}"
    fit = f"median R² {found['median_r2']:.2f}, {found['positive_slopes']} of {found['linears']} slopes up"
    valid = f"valid for {facts.family.label} {fingerprint[:12]}, {clip.steps} steps, {size}"
    say(f"{request.out}: {fit}; thresholds for {_listed(request.bits)} bits; {valid}")
    return solved


def record_errors(
    model: LoadedModel,
    clips: _Clips,
    full_weight: FullWeight | None,
    progress: OnProgress,
    say: Callable[[str], None] = lambda _: None,
    inputs: dict[str, list[torch.Tensor]] | None = None,
) -> tuple[list[LinearRecord], list[BlockRecord]]:
    """What W4A8 runs, one a clip, record of linears and blocks; sample inputs of the first into `inputs`."""
    records: list[LinearRecord] = []
    blocks: list[BlockRecord] = []
    total = sum(clip.steps for clip in clips.specs)
    for number, (clip, embeds) in enumerate(zip(clips.specs, clips.embeds, strict=True)):

        def on_step(step: int, of: int, before: int = number * clip.steps) -> None:
            progress("measure", before + step, total)

        run = CalibrationRun(model.layout, full_weight, inputs=inputs if number < INPUT_CLIPS else None)
        sample_under(model, run, "search", clip, embeds, on_step)
        records += run.records
        blocks += run.blocks
        say(f"measured: clip {number + 1} of {len(clips.specs)}")
    return records, blocks


def full_weights(model: LoadedModel) -> FullWeight:
    """(block, kind) -> the Linear's weight before quantization, from a full-precision transformer beside."""
    transformer = model.use(FULL)
    linears = [block_linears(block, model.facts.family) for block in transformer.transformer_blocks]
    return lambda block, kind: linears[block][kind].weight


def _checked(request: CalibrateRequest, machine: Machine) -> tuple[ModelFacts, tuple[ClipSpec, ...]]:
    """The model and the clips that a request asks for."""
    check_sampling(request.steps, request.cfg, request.seed)
    if request.steps < MIN_STEPS:
        raise InputError(f"--steps must be {MIN_STEPS} or more to calibrate, got {request.steps}")
    if not request.bits or not all(4 <= bits <= 8 for bits in request.bits):
        raise InputError(f"--bits must lie between 4 and 8, got {_listed(request.bits)}")
    prompts = read_prompts(request.model, request.prompts, DEFAULT_PROMPTS, held_out=False)
    check_sampling(request.steps, request.cfg, request.seed + len(prompts) - 1)
    facts = read_facts(request.model, request.pipeline)
    size = request.size or facts.size
    frames = facts.frames if request.frames is None else request.frames
    check_text_to_video(facts, "calibrate")
    check_clip(facts, size, frames, None)
    check_memory(facts, size, frames, request.cfg > 1, machine)
    check_target(request.out, "--out")
    if request.inputs is not None:
        check_target(request.inputs / FILE_NAME, "--inputs")
    return facts, tuple(
        ClipSpec(prompt.text, size, frames, "", request.steps, request.cfg, request.seed + number)
        for number, prompt in enumerate(prompts)
    )


def _run_once(
    model: LoadedModel,
    clips: _Clips,
    predictor: Predictor,
    expected: int,
    progress: OnProgress,
    say: Callable[[str], None],
) -> Callable[[DMPQConfig, bool], float]:
    """Whole runs at a trial threshold, about `expected` in all: their mean average bits."""
    done = 0

    def run_once(config: DMPQConfig, cache_on: bool) -> float:
        nonlocal done
        preset = PRESETS["paper" if config.error == "paper" else "balanced"]
        dmpq = replace(config, outlier_limit=preset.dmpq.outlier_limit)
        cache = preset.cache if cache_on else None
        settings = RunSettings("dmpq", dmpq, cache, predictor, "search")
        pairs = list(zip(clips.specs, clips.embeds, strict=True))[:THETA_CLIPS]
        bits = []
        for clip, embeds in pairs:
            bits.append(sample(model, settings, clip, embeds).report.average_activation_bits)
            done += 1
            progress("solve thresholds", done, max(expected, done + 1))
            say(f"solving for {config.bits:g} bits: clip {done} of about {max(expected, done)}")
        return sum(bits) / len(bits)

    return run_once


def _solving_clips(clips: _Clips, thresholds: int) -> int:
    """About how many clips it takes to solve that many thresholds."""
    return thresholds * RUNS_PER_THETA * min(THETA_CLIPS, len(clips.specs))


def _forecast(model: LoadedModel, clips: _Clips, thresholds: int) -> str:
    """How long it will take, from one step of the real thing after one that pays for compiling."""
    done: list[float] = []

    def on_step(step: int, of: int) -> None:
        synchronize(model.device)
        done.append(time.perf_counter())

    settings = RunSettings("w4a8", DMPQConfig(router="int8"), None, None, "search")
    sample(model, settings, replace(clips.specs[0], steps=2), clips.embeds[0], on_step)
    step = done[1] - done[0]
    solving = _solving_clips(clips, thresholds)
    minutes = (MEASURING * len(clips.specs) + solving) * clips.specs[0].steps * step / 60
    return (
        f"about {max(1, round(minutes))} min at {step:.2g} s a step: {len(clips.specs)} clips are measured, "
        f"then about {solving} more solve {thresholds} thresholds"
    )


def _listed(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:g}" for number in numbers)
