"""`sixbit generate`: one clip, a sheet that shows it beside full precision, picture and report of its run."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..sixbit_core.report_image import draw_run
from .errors import InputError
from .facts import REFERENCE, ModelFacts, check_clip, read_facts, reference_folder
from .files import make_folder, replacing, write_json
from .machine import Machine, find_machine, peak_memory_bytes, reset_peak_memory, versions
from .metrics import psnr, ssim
from .pipeline import LoadedModel, load_model
from .sample import ClipSpec, Sampled, sample
from .settings import Choice, RunSettings, resolve
from .transformer import FULL, full_precision_bytes, weight_bytes
from .video import find_codec, read_image, write_mp4, write_sheet

OnProgress = Callable[[str, int, int], None]  # (what, done, in all)
Say = Callable[[str], None]


@dataclass(frozen=True)
class GenerateRequest:
    """What `sixbit generate` was asked for.

    Attributes:
        model, pipeline: as in `facts.read_facts`.
        size, frames: of the clip; None for what the model was trained for.
        compare: whether to sample in full precision too, at the same seed.
        out: folder of the results.
        report: another place for report.json, or None.
        command: the command line, kept in the report.
    """

    model: str
    prompt: str
    out: Path
    choice: Choice = field(default_factory=Choice)
    pipeline: Path | None = None
    negative: str = ""
    image: Path | None = None
    steps: int = 50
    cfg: float = 6.0
    seed: int = 0
    size: tuple[int, int] | None = None
    frames: int | None = None
    compare: bool = False
    device: str = "auto"
    report: Path | None = None
    command: str = ""


@dataclass(frozen=True)
class GenerateResult:
    """A finished clip: (frames, H, W, 3) uint8, its report, and the files written."""

    frames: np.ndarray
    report: dict[str, Any]
    files: tuple[Path, ...]


def generate(
    request: GenerateRequest, progress: OnProgress = lambda *_: None, say: Say = lambda _: None
) -> GenerateResult:
    """Make one clip. Everything that can be refused is refused before weights load.

    Raises:
        InputError, CheckpointError: for a request that cannot be carried out.
        RuntimeError: when a run goes wrong, a latent that is not finite for one.
    """
    begun = time.perf_counter()
    machine = find_machine(request.device)
    facts = read_facts(request.model, request.pipeline)
    clip = check_request(request, facts)
    settings = resolve(request.choice, lambda: facts.checkpoint.fingerprint, bundled_predictor(request.model))
    out = make_folder(request.out)
    if settings.note:
        say(settings.note)
    compare = request.compare and not (settings.precision == "full" and settings.cache is None)
    reset_peak_memory(machine.device)
    first = FULL if compare else settings.weights
    model = load_model(request.model, request.pipeline, first, machine, facts=facts)
    say(status_line(machine, model, settings))
    text_start = time.perf_counter()
    embeds = model.encode(clip.prompt, clip.negative, clip.guided)
    seconds = {"text": time.perf_counter() - text_start}
    full_frames = None
    if compare:
        full = sample(model, None, clip, embeds, lambda done, of: progress("full precision", done, of))
        full_frames = model.decode(full.latents, clip.frames)
        if settings.weights != FULL:
            model.drop(FULL)
        model.use(settings.weights)
        reset_peak_memory(machine.device)
    run = sample(model, settings, clip, embeds, lambda done, of: progress(settings.precision, done, of))
    decode_start = time.perf_counter()
    frames = model.decode(run.latents, clip.frames)
    seconds |= {"decode": time.perf_counter() - decode_start, "load": model.seconds, "sample": run.seconds}
    seconds["total"] = time.perf_counter() - begun
    report = make_report(request, machine, model, settings, clip, run, seconds)
    if full_frames is not None:
        report |= compare_clips(frames, full_frames)
    files = write_results(out, request, report, facts, settings, frames, full_frames, run)
    return GenerateResult(frames, report, files)


def check_request(request: GenerateRequest, facts: ModelFacts) -> ClipSpec:
    """The clip that a request asks for. Raises InputError with one line for the first thing wrong with it."""
    if not request.prompt.strip():
        raise InputError("--prompt is empty; describe the clip")
    if not 1 <= request.steps <= 1000:
        raise InputError(f"--steps must lie between 1 and 1000, got {request.steps}")
    if not 0 <= request.cfg <= 100:
        raise InputError(f"--cfg must lie between 0 and 100, got {request.cfg:g}")
    if not 0 <= request.seed < 2**63:
        raise InputError(f"--seed must be 0 or more and below 2^63, got {request.seed}")
    size, frames = request.size or facts.size, request.frames or facts.frames
    if request.frames is not None:
        frames = request.frames
    check_clip(facts, size, frames, request.image)
    image = None if request.image is None else read_image(request.image)
    if request.compare and facts.checkpoint.is_quantized:
        raise InputError(
            f"--compare needs full-precision weights, and {facts.name} is quantized; leave it out"
        )
    find_codec()
    return ClipSpec(
        request.prompt, size, frames, request.negative, request.steps, request.cfg, request.seed, image
    )


def bundled_predictor(model: str) -> Path | None:
    """Where the predictor of the bundled reference lies; None for another model."""
    return reference_folder().parent / "predictor.json" if model == REFERENCE else None


def status_line(machine: Machine, model: LoadedModel, settings: RunSettings) -> str:
    """What this machine will do, in one line."""
    number = str(model.dtype).removeprefix("torch.")
    held = (
        weight_bytes(model.transformers[settings.weights]) if settings.weights in model.transformers else None
    )
    weights = "" if held is None else f", weights {held / 2**20:.1f} MiB"
    return (
        f"{model.facts.name} on {machine.device.type} ({machine.name}), {number}: {settings.label()}{weights}"
    )


def make_report(
    request: GenerateRequest,
    machine: Machine,
    model: LoadedModel,
    settings: RunSettings,
    clip: ClipSpec,
    run: Sampled,
    seconds: dict[str, float],
) -> dict[str, Any]:
    """The report of one clip; psnr_db and ssim stay null until it is compared."""
    facts = model.facts
    kept = run.report.to_dict()
    return {
        **{name: value for name, value in kept.items() if name not in ("router", "cache")},
        "model": facts.name,
        "fingerprint": facts.checkpoint.fingerprint,
        "precision": settings.precision,
        "router": settings.router,
        "cache": "off" if settings.cache is None else "tdc",
        "steps": clip.steps,
        "cfg": clip.cfg,
        "seed": clip.seed,
        "size": list(clip.size),
        "frames": clip.frames,
        "cache_settings": kept["cache"],
        "seconds": {name: round(seconds[name], 4) for name in ("load", "text", "sample", "decode", "total")},
        "seconds_per_step": round(seconds["sample"] / clip.steps, 6),
        "weight_bytes": weight_bytes(model.transformers[settings.weights]),
        "weight_bytes_full_precision": full_precision_bytes(facts),
        "peak_memory_bytes": peak_memory_bytes(machine.device),
        "psnr_db": None,
        "ssim": None,
        "machine": f"{machine.device.type}: {machine.name}",
        "versions": versions(),
        "command": request.command,
    }


def compare_clips(frames: np.ndarray, full: np.ndarray) -> dict[str, float]:
    """PSNR and SSIM of two clips, for a report."""
    a, b = torch.from_numpy(frames), torch.from_numpy(full)
    return {"psnr_db": round(psnr(a, b), 4), "ssim": round(ssim(a, b), 6)}


def write_results(
    out: Path,
    request: GenerateRequest,
    report: dict[str, Any],
    facts: ModelFacts,
    settings: RunSettings,
    frames: np.ndarray,
    full: np.ndarray | None,
    run: Sampled,
) -> tuple[Path, ...]:
    """Write clip, sheet, picture and report; the report last, so that it stands only beside its clip."""
    files = [out / "clip.mp4"]
    write_mp4(files[0], frames, facts.fps)
    if full is not None:
        files.append(out / "side_by_side.png")
        label = f"{settings.label()}: PSNR {report['psnr_db']:.1f} dB, SSIM {report['ssim']:.3f}"
        write_sheet(files[-1], [("full precision", full), (label, frames)])
    files.append(out / "run.png")
    with replacing(files[-1]) as temporary:
        draw_run(run.report, temporary)
    for path in filter(None, (out / "report.json", request.report)):
        write_json(path, report)
        files.append(path)
    return tuple(files)
