"""`sixbit evaluate`: many clips of one configuration, read back and scored.

On the reference every clip is read by its own evaluator (background, colour, shape, motion); shares come with
95 % Wilson intervals. On any model, `--against-full` adds PSNR and SSIM against full precision, same seed.
"""

import datetime
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..kernels import tuning
from .errors import InputError
from .facts import ModelFacts, check_clip, check_sampling, check_text_to_video, read_facts
from .files import check_target, write_json
from .intervals import bootstrap_mean, wilson
from .machine import Machine, find_machine, reset_peak_memory, versions
from .memory import check_memory
from .pipeline import LoadedModel, load_model
from .prompts import Prompt, read_prompts
from .report import compare_clips, make_report, status_line
from .rows import Row, RowStore, Shard, digest, mine, own_program, run_workers
from .sample import ClipSpec, sample_frames
from .settings import Choice, RunSettings, settle

KINDS = ("background", "colour", "shape", "motion")
MEANS = ("psnr_db", "ssim", "average_activation_bits", "effective_activation_bits", "skipped_fraction")
DEFAULT_PROMPTS = 16


@dataclass(frozen=True)
class EvaluateRequest:
    """What `sixbit evaluate` was asked for; see the command line."""

    model: str
    out: Path
    choice: Choice = field(default_factory=Choice)
    pipeline: Path | None = None
    prompts: str | None = None
    seeds: tuple[int, ...] = (0,)
    steps: int = 50
    cfg: float = 6.0
    size: tuple[int, int] | None = None
    frames: int | None = None
    against_full: bool = False
    workers: int = 1
    shard: Shard | None = None
    device: str = "auto"
    command: str = ""


@dataclass(frozen=True)
class _Work:
    """A checked request: every clip by key, and what to make it with."""

    machine: Machine
    facts: ModelFacts
    settings: RunSettings
    clips: Mapping[str, tuple[Prompt, ClipSpec]]
    store: RowStore


def evaluate(
    request: EvaluateRequest,
    progress: Callable[[str, int, int], None] = lambda *_: None,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any] | None:
    """Make and score the clips; write and return the result. A worker (`shard`) only leaves its rows: None.

    Raises:
        InputError: for what cannot be carried out, before weights load.
    """
    begin = time.perf_counter()
    work = _prepare(request)
    left = [key for key in mine(list(work.clips), request.shard) if key not in work.store.rows]
    if request.workers > 1 and request.shard is None and left:

        def watch() -> None:
            work.store.load()
            progress("clips", len(work.store.rows), len(work.clips))

        run_workers([*own_program(), *shlex.split(request.command)[1:]], request.workers, watch)
    elif left:
        _make(request, work, left, progress, say)
    if request.shard is not None:
        return None
    rows = [work.store.rows[key] for key in work.clips]
    result = {
        "machine": f"{work.machine.device.type}: {work.machine.name}",
        "versions": versions(),
        "command": request.command,
        "date": datetime.date.today().isoformat(),
        "bars": [],
        "summary": {**summarize(rows), "wall_seconds": round(time.perf_counter() - begin, 2)},
        "rows": rows,
    }
    write_json(request.out, result)
    work.store.clear()
    return result


def evaluate_clip(
    model: LoadedModel,
    settings: RunSettings,
    machine: Machine,
    prompt: Prompt,
    clip: ClipSpec,
    full: np.ndarray | None = None,
    command: str = "",
) -> Row:
    """Sample one clip: its report, the reference evaluator's marks, PSNR and SSIM against `full`."""
    begin = time.perf_counter()
    embeds = model.encode(clip.prompt, clip.negative, clip.guided)
    encoded = time.perf_counter()
    reset_peak_memory(machine.device)
    frames, run = sample_frames(model, settings, clip, embeds)
    total = time.perf_counter() - begin
    seconds = {
        "load": model.load_seconds(settings.weights),
        "text": encoded - begin,
        "sample": run.seconds,
        "decode": total - run.seconds - (encoded - begin),
        "total": total,
    }
    row = {"prompt": clip.prompt, **make_report(model, settings, machine, clip, run, seconds, command)}
    return row | score_frames(prompt, frames) | ({} if full is None else compare_clips(frames, full))


def score_frames(prompt: Prompt, frames: np.ndarray) -> Row:
    """Marks of the reference's evaluator for a clip of (T, H, W, 3) uint8; nothing for another prompt."""
    if prompt.scene is None:
        return {}
    from ..reference.evaluator import read_clip, score

    marks = score(prompt.scene, read_clip(frames))
    return {"objects": len(prompt.scene.objects), **{kind: bool(marks[kind]) for kind in KINDS}}


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """Shares with 95 % Wilson and means with 95 % bootstrap intervals, over the rows that have them."""
    summary: dict[str, Any] = {"clips": len(rows)}
    scored = [row for row in rows if all(kind in row for kind in KINDS)]
    if scored:
        marks = {kind: [row[kind] for row in scored] for kind in KINDS}
        marks["joint"] = [all(row[kind] for kind in KINDS) for row in scored]
        summary["accuracy"] = {
            kind: {"share": sum(right) / len(right), "interval": list(wilson(sum(right), len(right)))}
            for kind, right in marks.items()
        }
    for name in MEANS:
        values = [row[name] for row in rows if row.get(name) is not None]
        if values:
            mean, low, high = bootstrap_mean(values)
            summary[name] = {"mean": mean, "interval": [low, high]}
    summary["seconds_per_clip"] = sum(row["seconds"]["total"] for row in rows) / max(1, len(rows))
    return summary


def _prepare(request: EvaluateRequest) -> _Work:
    machine = find_machine(request.device)
    prompts = read_prompts(request.model, request.prompts, DEFAULT_PROMPTS, held_out=True)
    facts = read_facts(request.model, request.pipeline)
    size, frames = request.size or facts.size, facts.frames if request.frames is None else request.frames
    check_text_to_video(facts, "evaluate")
    for seed in request.seeds:
        check_sampling(request.steps, request.cfg, seed)
    check_clip(facts, size, frames, None)
    check_memory(facts, size, frames, request.cfg > 1, machine)
    if request.workers < 1:
        raise InputError(f"--workers must be 1 or more, got {request.workers}")
    if request.against_full and facts.checkpoint.is_quantized:
        raise InputError(f"--against-full needs full-precision weights, and {facts.name} is quantized")
    settings = settle(request.choice, facts, machine)
    check_target(request.out, "--out")
    clips = {
        f"{number}/{seed}": (
            prompt,
            ClipSpec(prompt.text, size, frames, "", request.steps, request.cfg, seed),
        )
        for number, prompt in enumerate(prompts)
        for seed in request.seeds
    }
    what = {
        "fingerprint": facts.checkpoint.fingerprint,
        "settings": settings.label(),
        "choice": {name: str(value) for name, value in vars(request.choice).items()},
        "predictor": None if settings.predictor is None else digest(settings.predictor.to_json()),
        "clips": len(clips),
        "captions": digest(*map(repr, clips.values())),
        "against_full": request.against_full,
        "machine": f"{machine.device.type}: {machine.name}",
        "versions": versions(),
    }
    return _Work(machine, facts, settings, clips, RowStore(request.out, what, request.shard))


def _make(
    request: EvaluateRequest,
    work: _Work,
    keys: Sequence[str],
    progress: Callable[[str, int, int], None],
    say: Callable[[str], None],
) -> None:
    model = load_model(request.model, request.pipeline, work.settings.weights, work.machine, facts=work.facts)
    clip = work.clips[keys[0]][1]
    for line in filter(None, (work.settings.note, status_line(model, work.settings, work.machine, clip))):
        say(line)
    for key in keys:
        prompt, clip = work.clips[key]
        full = sample_frames(model, None, clip)[0] if request.against_full else None
        with tuning(work.settings.tunes, lambda _, number, of: progress("tuning", number, of)):
            row = evaluate_clip(model, work.settings, work.machine, prompt, clip, full, request.command)
        work.store.add(key, row)
        progress("clips", len(work.store.rows), len(work.clips))
