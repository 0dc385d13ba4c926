"""`sixbit calibrate`: measure a model and write the predictor that its routers decide by.

First W4A8 runs without cache, one a caption, record Γ and the errors of both activation formats; then whole
runs solve θ for every asked-for bits, without and with the cache. The same call gives the same file.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..sixbit_core.calibrate import fit_predictor, solve_thetas
from ..sixbit_core.calibration_run import CalibrationRun, FullWeight, LinearRecord
from ..sixbit_core.config import PRESETS, DMPQConfig
from ..sixbit_core.predictor import Predictor
from .attach import block_linears
from .errors import InputError
from .facts import check_clip, check_sampling, check_text_to_video, read_facts
from .files import check_target
from .machine import find_machine
from .pipeline import LoadedModel, TextEmbeds, load_model
from .prompts import read_prompts
from .sample import ClipSpec, sample, sample_under
from .settings import RunSettings
from .transformer import FULL

DEFAULT_PROMPTS = 4
THETA_CLIPS = 2  # captions that each threshold is tried on: whole runs, so on a large model the longest part
RUNS_PER_THETA = 5  # of at most 8, for the forecast
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
    specs = _specs(request)
    facts = read_facts(request.model, request.pipeline)
    model = load_model(request.model, request.pipeline, "search", machine, facts=facts)
    clips = _Clips(specs, tuple(model.encode(c.prompt, c.negative, c.guided) for c in specs))
    paper = not facts.checkpoint.is_quantized
    errors = ("excess", "paper") if paper else ("excess",)
    say(_forecast(model, clips, len(request.bits) * 2 * len(errors)))
    records = record_errors(model, clips, full_weights(model) if paper else None, progress)
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
        predictor = fit_predictor(records, model.layout, family, fingerprint, how)
    except ValueError as error:
        raise InputError(str(error)) from error
    if paper:
        model.drop(FULL)
    run_once = _run_once(model, clips, predictor, progress)
    solved = solve_thetas(predictor, records, run_once, request.bits, errors)
    solved.save(request.out)
    found, size = solved.summary(), f"{clip.size[0]}x{clip.size[1]}"
    fit = f"median R² {found['median_r2']:.2f}, {found['positive_slopes']} of {found['linears']} slopes up"
    valid = f"valid for {facts.family.label} {fingerprint[:12]}, {clip.steps} steps, {size}"
    say(f"{request.out}: {fit}; thresholds for {_listed(request.bits)} bits; {valid}")
    return solved


def record_errors(
    model: LoadedModel, clips: _Clips, full_weight: FullWeight | None, progress: OnProgress
) -> list[LinearRecord]:
    """Γ and errors of every linear in W4A8 runs, one a clip."""
    records: list[LinearRecord] = []
    total = sum(clip.steps for clip in clips.specs)
    for number, (clip, embeds) in enumerate(zip(clips.specs, clips.embeds, strict=True)):

        def on_step(step: int, of: int, before: int = number * clip.steps) -> None:
            progress("measure", before + step, total)

        run = CalibrationRun(model.layout, full_weight)
        sample_under(model, run, "search", clip, embeds, on_step)
        records += run.records
    return records


def full_weights(model: LoadedModel) -> FullWeight:
    """(block, kind) -> the Linear's weight before quantization, from a full-precision transformer beside."""
    transformer = model.use(FULL)
    linears = [block_linears(block, model.facts.family) for block in transformer.transformer_blocks]
    return lambda block, kind: linears[block][kind].weight


def _specs(request: CalibrateRequest) -> tuple[ClipSpec, ...]:
    check_sampling(request.steps, request.cfg, request.seed)
    if request.steps < MIN_STEPS:
        raise InputError(f"--steps must be {MIN_STEPS} or more to calibrate, got {request.steps}")
    if not request.bits or not all(4 <= bits <= 8 for bits in request.bits):
        raise InputError(f"--bits must lie between 4 and 8, got {_listed(request.bits)}")
    prompts = read_prompts(request.model, request.prompts, DEFAULT_PROMPTS, held_out=False)
    facts = read_facts(request.model, request.pipeline)
    size = request.size or facts.size
    frames = facts.frames if request.frames is None else request.frames
    check_text_to_video(facts, "calibrate")
    check_clip(facts, size, frames, None)
    check_target(request.out, "--out")
    return tuple(
        ClipSpec(prompt.text, size, frames, "", request.steps, request.cfg, request.seed + number)
        for number, prompt in enumerate(prompts)
    )


def _run_once(
    model: LoadedModel, clips: _Clips, predictor: Predictor, progress: OnProgress
) -> Callable[[DMPQConfig, bool], float]:
    """Whole runs at a trial threshold: their mean average bits."""
    tried = 0

    def run_once(config: DMPQConfig, cache_on: bool) -> float:
        nonlocal tried
        tried += 1
        preset = PRESETS["paper" if config.error == "paper" else "balanced"]
        dmpq = replace(config, outlier_limit=preset.dmpq.outlier_limit)
        cache = preset.cache if cache_on else None
        settings = RunSettings("dmpq", dmpq, cache, predictor, "search")
        pairs = list(zip(clips.specs, clips.embeds, strict=True))[:THETA_CLIPS]
        bits = [
            sample(model, settings, clip, embeds).report.average_activation_bits for clip, embeds in pairs
        ]
        progress("solve thresholds", tried, tried + 1)
        return sum(bits) / len(bits)

    return run_once


def _forecast(model: LoadedModel, clips: _Clips, thresholds: int) -> str:
    """How long it will take, from two steps of the real thing."""
    short = replace(clips.specs[0], steps=2)
    settings = RunSettings("w4a8", DMPQConfig(router="int8"), None, None, "search")
    seconds = []
    for _ in range(2):  # the first pays for compiling
        begin = time.perf_counter()
        sample(model, settings, short, clips.embeds[0])
        seconds.append(time.perf_counter() - begin)
    step = seconds[-1] / short.steps
    solving = thresholds * RUNS_PER_THETA * min(THETA_CLIPS, len(clips.specs))
    minutes = (1.5 * len(clips.specs) + solving) * clips.specs[0].steps * step / 60
    measured = (
        f"{len(clips.specs)} clips are measured, then about {solving} more solve {thresholds} thresholds"
    )
    return f"about {max(1, round(minutes))} min: {measured}"


def _listed(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:g}" for number in numbers)
