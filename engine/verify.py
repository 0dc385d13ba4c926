"""`sixbit verify`: what quantizing and skipping cost on weights at hand, for a report that others can judge.

Each prompt is sampled in full precision and by every other method from the same noise, and held against full
precision: PSNR, SSIM, flicker, composition (`sixbit_core.metrics`), seconds, cost (`cost`). OUT gets
`verify.json`, `verify.png`, and the clips themselves in `clips`, by which a second call goes on.
"""

import datetime
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PureWindowsPath
from typing import Any

import numpy as np
import torch

from ..sixbit_core.metrics import composition, flicker
from ..sixbit_core.report import spelled_bytes
from .check import sampling_seconds, spelled_seconds
from .cost import Macs, model_macs
from .errors import InputError
from .facts import ModelFacts, check_clip, check_sampling, check_text_to_video, read_facts
from .files import check_target, make_folder, write_json
from .intervals import bootstrap_mean
from .machine import Machine, find_machine, versions
from .memory import check_memory
from .pipeline import LoadedModel, TextEmbeds, load_model
from .prompts import read_prompts
from .report import compare_clips
from .rows import Row, digest
from .sample import ClipSpec
from .verify_clips import ClipStore, Key
from .verify_methods import FULL_PRECISION, Method, find_methods, order_of_work
from .verify_sheet import Sheet, draw_sheet

DEFAULT_PROMPTS = 4
AGAINST_FULL = ("psnr_db", "ssim", "flicker", "composition")
MEANS = (*AGAINST_FULL, "seconds", "cost", "skipped_fraction")
MEANS += ("average_activation_bits", "effective_activation_bits")


@dataclass(frozen=True)
class VerifyRequest:
    """What `sixbit verify` was asked for; see the command line."""

    model: str
    out: Path
    pipeline: Path | None = None
    prompts: str | None = None
    steps: int = 50
    cfg: float = 6.0
    seed: int = 0
    size: tuple[int, int] | None = None
    frames: int | None = None
    device: str = "auto"
    force: bool = False
    command: str = ""


@dataclass(frozen=True)
class _Work:
    """A checked request: a clip for each prompt, and the methods."""

    machine: Machine
    facts: ModelFacts
    clips: Sequence[ClipSpec]
    methods: Sequence[Method]
    store: ClipStore

    def left(self, method: Method) -> list[int]:
        """Numbers of the prompts whose clip is not made yet."""
        return [n for n in range(len(self.clips)) if (n, method.name) not in self.store.rows]


def verify(
    request: VerifyRequest,
    progress: Callable[[str, int, int], None] = lambda *_: None,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Make what clips are not there yet; write and return the result.

    Raises:
        InputError, CheckpointError: for what cannot be carried out, before weights load.
    """
    work = _prepare(request)
    say(_plan_line(work))
    if any(map(work.left, work.methods)):
        _make(request, work, progress, say)
    result = _result(request, work)
    write_json(request.out / "verify.json", result)
    draw_sheet(_sheet(work, result), request.out / "verify.png")
    return result


def _prepare(request: VerifyRequest) -> _Work:
    machine = find_machine(request.device)
    prompts = read_prompts(request.model, request.prompts, DEFAULT_PROMPTS, held_out=True)
    facts = read_facts(request.model, request.pipeline)
    check_text_to_video(facts, "verify")
    if facts.checkpoint.is_quantized:
        raise InputError(
            f"verify compares with full precision, and {facts.name} is quantized; give --model the 16-bit "
            "pipeline folder or file that it was made from"
        )
    size, frames = request.size or facts.size, facts.frames if request.frames is None else request.frames
    check_sampling(request.steps, request.cfg, request.seed)
    check_sampling(request.steps, request.cfg, request.seed + len(prompts) - 1)
    check_clip(facts, size, frames, None)
    check_memory(facts, size, frames, request.cfg > 1, machine)
    methods = find_methods(facts, machine)
    make_folder(request.out)
    for name in ("verify.json", "verify.png"):
        check_target(request.out / name, "--out")
    clips = [
        ClipSpec(prompt.text, size, frames, "", request.steps, request.cfg, request.seed + number)
        for number, prompt in enumerate(prompts)
    ]
    what = {
        "fingerprint": facts.checkpoint.fingerprint,
        "methods": {method.name: method.told for method in methods},
        "prompts": digest(*(clip.prompt for clip in clips)),
        "steps": request.steps,
        "cfg": request.cfg,
        "seed": request.seed,
        "size": list(size),
        "frames": frames,
        "machine": f"{machine.device.type}: {machine.name}",
        "versions": versions(),
    }
    return _Work(machine, facts, clips, methods, ClipStore(request.out / "clips", what, request.force))


def _plan_line(work: _Work) -> str:
    """How many clips, how long, how much disk."""
    clip, count = work.clips[0], len(work.clips) * len(work.methods)
    (height, width), left = clip.size, sum(len(work.left(method)) for method in work.methods)
    words = f"{count} clips of {clip.frames} frames of {height}x{width}, {clip.steps} steps"
    disk = spelled_bytes(count * clip.frames * height * width * 3)
    if not left:
        return f"{words}: all are in {work.store.folder} already"
    time = spelled_seconds(left * sampling_seconds(work.facts, clip, work.machine))
    return (
        f"{words}: {left} to make, about {time} if each takes what full precision does (estimated from a "
        f"matrix product just now), {disk} in {work.store.folder}; stopped and given again, it goes on"
    )


def _make(
    request: VerifyRequest, work: _Work, progress: Callable[[str, int, int], None], say: Callable[[str], None]
) -> None:
    """Make and score the clips that are left."""
    todo = [method for method in order_of_work(work.methods) if work.left(method)]
    model = load_model(request.model, request.pipeline, todo[0].weights, work.machine, facts=work.facts)
    embeds = [model.encode(clip.prompt, clip.negative, clip.guided) for clip in work.clips]
    macs = model_macs(work.facts, work.clips[0].size, work.clips[0].frames)
    done, count = len(work.store.rows), len(work.clips) * len(work.methods)
    for method in todo:
        for other in [weights for weights in model.transformers if weights != method.weights]:
            model.drop(other)
        left = work.left(method)
        warm_up = replace(work.clips[left[0]], steps=1)  # kernels are compiled before a clock runs
        method.sample(model, macs, warm_up, embeds[left[0]])
        for number in left:
            row = _make_clip(work, model, macs, method, number, embeds[number])
            done += 1
            progress("clips", done, count)
            close = "" if row["psnr_db"] is None else f", PSNR {row['psnr_db']:.1f} dB"
            say(f"prompt {number + 1}, {method.title}: {row['seconds']:.1f} s{close}")


def _make_clip(
    work: _Work, model: LoadedModel, macs: Macs, method: Method, number: int, embeds: TextEmbeds
) -> Row:
    clip, store, share = work.clips[number], work.store, 1.0
    if method.costs_as is not None:
        steps = max(1, round(store.rows[number, method.costs_as]["cost"] * clip.steps))
        share, clip = steps / clip.steps, replace(clip, steps=steps)
    latents, told = method.sample(model, macs, clip, embeds)
    frames = model.decode(latents, clip.frames)
    row = {"prompt": number, "method": method.name, "seed": clip.seed, "steps": clip.steps, **told}
    row["cost"] = round(share * row["cost"], 6)
    full = None if method.name == FULL_PRECISION else store.frames((number, FULL_PRECISION))
    row |= dict.fromkeys(AGAINST_FULL) if full is None else _compare(frames, full)
    store.add((number, method.name), row, frames)
    return row


def _compare(frames: np.ndarray, full: np.ndarray) -> Row:
    a, b = torch.from_numpy(frames), torch.from_numpy(full)
    return {
        **compare_clips(frames, full),
        "flicker": round(flicker(a, b), 4),
        "composition": round(composition(a, b), 6),
    }


def _result(request: VerifyRequest, work: _Work) -> dict[str, Any]:
    keys: list[Key] = [(n, method.name) for n in range(len(work.clips)) for method in work.methods]
    rows, clip = [work.store.rows[key] for key in keys], work.clips[0]
    return {
        "format": "sixbit-verify",
        "version": 1,
        "model": work.facts.name,
        "fingerprint": work.facts.checkpoint.fingerprint,
        "family": work.facts.family.name,
        "machine": f"{work.machine.device.type}: {work.machine.name}",
        "versions": versions(),
        "command": without_folders(request.command),
        "date": datetime.date.today().isoformat(),
        "cfg": clip.cfg,
        "steps": clip.steps,
        "size": list(clip.size),
        "frames": clip.frames,
        "prompts": [clip.prompt for clip in work.clips],
        "seeds": [clip.seed for clip in work.clips],
        "methods": {method.name: {"title": method.title, "told": method.told} for method in work.methods},
        "means": {method.name: _means(rows, method.name) for method in work.methods},
        "clips": rows,
    }


def _means(rows: Sequence[Row], method: str) -> Row:
    """Means of a method over the prompts, with 95 % bootstrap intervals."""
    found: Row = {}
    for name in MEANS:
        values = [row[name] for row in rows if row["method"] == method and row[name] is not None]
        if values:
            mean, low, high = bootstrap_mean(values)
            found[name] = {"mean": round(mean, 6), "interval": [round(low, 6), round(high, 6)]}
    return found


def without_folders(command: str) -> str:
    """A command line whose paths are cut to their last names: no folder or user name is published."""
    words = []
    for word in shlex.split(command):
        flag, equals, path = word.rpartition("=") if word.startswith("--") else ("", "", word)
        words.append(flag + equals + (PureWindowsPath(path).name or "."))
    return shlex.join(words)


def _sheet(work: _Work, result: dict[str, Any]) -> Sheet:
    first, middle, last = 0, work.clips[0].frames // 2, work.clips[0].frames - 1
    picks = sorted({first, middle, last})
    return Sheet(
        result,
        [[work.store.frames((n, m.name))[picks] for m in work.methods] for n in range(len(work.clips))],
    )
