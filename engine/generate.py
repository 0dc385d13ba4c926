"""`sixbit generate`: one clip, a sheet that shows it beside full precision, picture and report of its run."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..kernels import tuning
from ..sixbit_core.report import RunMemory
from ..sixbit_core.report_image import draw_run
from .errors import InputError
from .facts import ModelFacts, check_clip, check_sampling, read_facts
from .files import check_folder, check_target, make_folder, write_json
from .machine import find_machine, peak_memory_bytes, reset_peak_memory
from .memory import check_memory
from .pipeline import LoadedModel, TextEmbeds, load_model
from .report import compare_clips, done_line, make_report, status_line
from .sample import ClipSpec, Sampled, place_cache, sample
from .settings import Choice, RunSettings, settle
from .transformer import FULL
from .video import find_codec, read_image, write_mp4, write_sheet

RESULTS = ("report.json", "side_by_side.png", "run.png", "clip.mp4")


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
    """A finished clip: (frames, H, W, 3) uint8, its report, the files written, and one line that says it."""

    frames: np.ndarray
    report: dict[str, Any]
    files: tuple[Path, ...]
    line: str


def generate(
    request: GenerateRequest,
    progress: Callable[[str, int, int], None] = lambda *_: None,
    say: Callable[[str], None] = lambda _: None,
) -> GenerateResult:
    """Make one clip. What can be refused is refused before weights load.

    Args:
        progress: called with (what, steps done, steps in all).
        say: called with each line for the reader.

    Raises:
        InputError, CheckpointError: for a request that cannot be carried out.
        RuntimeError: when a run goes wrong, a latent that is not finite for one.
    """
    begin = time.perf_counter()
    machine = find_machine(request.device)
    facts = read_facts(request.model, request.pipeline)
    clip = check_request(request, facts)
    check_memory(facts, clip.size, clip.frames, clip.guided, machine)
    settings = settle(request.choice, facts, machine)
    out = make_places(request)
    model = load_model(
        request.model, request.pipeline, FULL if request.compare else settings.weights, machine, facts=facts
    )
    text_begin = time.perf_counter()
    embeds = model.encode(clip.prompt, clip.negative, clip.guided)
    text_seconds = time.perf_counter() - text_begin
    full, full_seconds, full_peak, aside = None, None, None, 0.0  # what took time for the comparison alone
    if request.compare:
        reset_peak_memory(machine.device)
        full, full_seconds = _sample_full(model, clip, embeds, progress)
        full_peak = peak_memory_bytes(machine.device)
        aside = full_seconds["sample"] + full_seconds["decode"]
        if settings.weights != FULL:
            model.drop(FULL)
            aside += model.build_seconds[FULL]
        model.use(settings.weights)
    reset_peak_memory(machine.device)
    settings = place_cache(model, settings, clip)
    for line in filter(None, (settings.note, status_line(model, settings, machine, clip))):
        say(line)
    with tuning(settings.tunes, lambda _, number, of: progress("tuning", number, of)):
        run = sample(model, settings, clip, embeds, lambda done, of: progress(settings.precision, done, of))
    decode_begin = time.perf_counter()
    frames = model.decode(run.latents, clip.frames)
    end = time.perf_counter()
    seconds = {
        "load": model.load_seconds(settings.weights),
        "text": text_seconds,
        "sample": run.seconds,
        "decode": end - decode_begin,
        "total": end - begin - aside,
    }
    report = make_report(model, settings, machine, clip, run, seconds, request.command)
    report["seconds_full_precision"] = full_seconds
    report["peak_memory_bytes_full_precision"] = full_peak
    report |= {} if full is None else compare_clips(frames, full)
    files = write_results(request, out, report, facts.fps, settings, (frames, full), run)
    return GenerateResult(frames, report, files, done_line(report, out))


def make_places(request: GenerateRequest) -> Path:
    """The folder of the results, made with that of `--report` once both are seen to be possible.

    Raises:
        InputError: when one is not; nothing is made then.
    """
    out, report = request.out, request.report
    check_folder(out, "--out")
    for name in RESULTS:
        if (out / name).is_dir():
            raise InputError(f"{out / name} is a folder, and a file must go there; choose another --out")
    if report is not None:
        check_folder(report.parent, "--report")
        if report.resolve() in [(out / name).resolve() for name in RESULTS]:
            raise InputError(f"--report {report} is written anyway; give a place outside --out")
        check_target(report, "--report")
    return make_folder(out)


def _sample_full(
    model: LoadedModel, clip: ClipSpec, embeds: TextEmbeds, progress: Callable[[str, int, int], None]
) -> tuple[np.ndarray, dict[str, float]]:
    """The clip in full precision, and the seconds that went into it."""
    run = sample(model, None, clip, embeds, lambda done, of: progress("full precision", done, of))
    begin = time.perf_counter()
    frames = model.decode(run.latents, clip.frames)
    seconds = {
        "load": model.load_seconds(FULL),
        "sample": run.seconds,
        "decode": time.perf_counter() - begin,
    }
    return frames, {name: round(value, 4) for name, value in seconds.items()}


def _memory(report: dict[str, Any]) -> RunMemory:
    """For the picture. On a CPU the peak is that of the process since it began, so the run's is unknown."""
    counted = report["machine"].startswith("cuda")
    names = ("peak_memory_bytes", "peak_memory_bytes_full_precision")
    peaks = (report[name] if counted else None for name in names)
    return RunMemory(report["weight_bytes"], report["weight_bytes_full_precision"], *peaks)


def check_request(request: GenerateRequest, facts: ModelFacts) -> ClipSpec:
    """The clip that a request asks for. Raises InputError with one line for the first thing wrong with it."""
    if not request.prompt.strip():
        raise InputError("--prompt is empty; describe the clip")
    check_sampling(request.steps, request.cfg, request.seed)
    size = request.size or facts.size
    frames = facts.frames if request.frames is None else request.frames
    check_clip(facts, size, frames, request.image)
    image = None if request.image is None else read_image(request.image)
    if request.compare and facts.checkpoint.is_quantized:
        raise InputError(
            f"--compare needs full-precision weights, and {facts.name} is quantized; leave it out"
        )
    find_codec()
    prompt, negative = request.prompt, request.negative
    return ClipSpec(prompt, size, frames, negative, request.steps, request.cfg, request.seed, image)


def write_results(
    request: GenerateRequest,
    out: Path,
    report: dict[str, Any],
    fps: int,
    settings: RunSettings,
    clips: tuple[np.ndarray, np.ndarray | None],
    run: Sampled,
) -> tuple[Path, ...]:
    """Write clip, sheet, picture and report; the report last, so that it stands only beside its clip."""
    frames, full = clips
    for name in RESULTS:  # of a run before this one
        (out / name).unlink(missing_ok=True)
    files = [out / "clip.mp4"]
    write_mp4(files[0], frames, fps)
    if full is not None:
        files.append(out / "side_by_side.png")
        label, close = settings.label(report["average_activation_bits"]), report["psnr_db"]
        label = f"{label}: PSNR {close:.1f} dB, SSIM {report['ssim']:.3f}"
        write_sheet(files[-1], [("full precision", full), (label, frames)])
    files.append(out / "run.png")
    draw_run(run.report, files[-1], _memory(report))
    for path in filter(None, (out / "report.json", request.report)):
        write_json(path, report)
        files.append(path)
    return tuple(files)
