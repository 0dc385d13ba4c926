"""`sixbit check`: what is there, what is missing, what this machine will do, in how much memory and time.

Nothing is loaded and nothing can fail: what cannot be found out is said.

    FLOP of a forward = 2 · streams · layers · tokens · (12 · width² + 2 · tokens · width)
"""

from __future__ import annotations

import importlib.util
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..kernels import backend_line, tuning_seconds
from ..sixbit_core.config import NATIVE_FP4
from ..sixbit_core.memory import FULL, formats_of, sampling_bytes
from ..sixbit_core.report import spelled_bytes
from .errors import InputError
from .facts import ModelFacts, check_clip, read_facts
from .machine import Machine, find_machine, versions
from .memory import check_memory
from .settings import Choice, RunSettings, settle

if TYPE_CHECKING:
    from .sample import ClipSpec

# Lowest compute capability -> what it means for the routes; the first that fits counts.
PATHS = (
    (NATIVE_FP4, "FP4 tensor cores: NVFP4 and INT8 activations both gain speed"),
    ((8, 0), "no FP4 tensor cores: INT8 activations gain speed, NVFP4 is emulated and gains none"),
    ((0, 0), "no Triton kernels for this GPU: right and slow"),
)
WHY = {"diffusers": "sampling", "transformers": "captions", "triton": "GPU kernels"}


def check(model: str, pipeline: Path | None, choice: Choice, given: Namespace) -> Iterator[str]:
    """The lines to show, one by one.

    Raises:
        InputError, CheckpointError: for a model, settings or a clip that cannot be, once the lines about this
            machine have been told.
    """
    found = versions()
    yield "libraries: " + ", ".join(f"{name} {version}" for name, version in found.items())
    missing = [name for name in WHY if importlib.util.find_spec(name) is None]
    for name in missing:
        yield f"missing: {name}, needed for {WHY[name]}"
    yield _said(_codec_line)
    try:
        machine = find_machine(given.device)
    except InputError as error:
        yield f"missing: {error}"
        machine = find_machine("cpu")
    yield f"machine: {machine.device.type} ({machine.name}), {spelled_bytes(machine.memory_bytes)}"
    yield f"path: {machine_path(machine)}"
    facts = read_facts(model, pipeline)
    yield from _model_lines(facts, machine, choice, given, not {"diffusers", "transformers"} & set(missing))


def machine_path(machine: Machine) -> str:
    """What the block linears will run on."""
    if machine.device.type == "cpu":
        return f"{backend_line()} On a CPU they are right and slow; the reference model is made for it."
    seconds = tuning_seconds(machine.device)
    tuning = (
        f" A first run tunes kernels for up to {seconds:.0f} s (not with --no-tuning)." if seconds else ""
    )
    return f"{backend_line()}{tuning} {capability_path(machine.capability or (0, 0))}"


def capability_path(capability: tuple[int, int]) -> str:
    """What a CUDA device of a compute capability does with the routes."""
    return next(path for lowest, path in PATHS if capability >= lowest)


def _model_lines(
    facts: ModelFacts, machine: Machine, choice: Choice, given: Namespace, samples: bool
) -> Iterator[str]:
    checkpoint = facts.checkpoint
    kind = "quantized" if checkpoint.is_quantized else "8 bits" if checkpoint.coded else "16 or 32 bits"
    yield f"model: {facts.name}, {facts.family.label}, {kind}, fingerprint {checkpoint.fingerprint[:12]}"
    settings = settle(choice, facts, machine)
    yield f"run: {settings.label()}" + (f" ({settings.note})" if settings.note else "")
    size, frames = given.size or facts.size, facts.frames if given.frames is None else given.frames
    check_clip(facts, size, frames, Path("image") if facts.needs_image else None)
    check_memory(facts, size, frames, given.cfg > 1, machine)
    yield f"clip: {frames} frames of {size[0]}x{size[1]}, {facts.fps} a second, {given.steps} steps"
    if not samples:
        yield 'memory, time: cannot be told; pip install "sixbit-diffusion[engine]"'
        return
    from .sample import ClipSpec

    clip = ClipSpec("", size, frames, steps=given.steps, cfg=given.cfg)
    yield _memory_line(facts, settings, clip, machine)
    minutes = spelled_seconds(sampling_seconds(facts, clip, machine))
    yield f"time: about {minutes} to sample, estimated from a matrix product just now"


def _memory_line(facts: ModelFacts, settings: RunSettings, clip: ClipSpec, machine: Machine) -> str:
    from .pipeline import compute_dtype
    from .report import cache_bytes
    from .transformer import expected_weight_bytes, full_precision_bytes

    full, dtype = full_precision_bytes(facts), compute_dtype(facts.family, machine)
    weights = expected_weight_bytes(facts, settings.weights, machine.device, dtype)
    cache = 0 if settings.cache is None else cache_bytes(facts, settings, clip, dtype)
    rest = sum(
        file.stat().st_size
        for part in ("text_encoder", "vae")
        for file in (facts.folder / part).glob("*.safetensors")
    )
    streams = 2 if clip.guided else 1
    tokens = facts.tokens(clip.size, clip.frames)
    formats = FULL if settings.dmpq is None else formats_of(settings.dmpq, settings.cache is not None)
    inside = sampling_bytes(formats, tokens, facts.width, dtype.itemsize, streams)
    return (
        f"memory: transformer {spelled_bytes(weights)} (16-bit {spelled_bytes(full)}), "
        f"delta cache {spelled_bytes(cache)}, sampling beside them about {spelled_bytes(inside)}; "
        f"text encoder and VAE {spelled_bytes(rest)}"
    )


def sampling_seconds(facts: ModelFacts, clip: ClipSpec, machine: Machine) -> float:
    """Seconds that sampling a clip in full precision may take, by a matrix product timed now."""
    from .pipeline import compute_dtype

    width, tokens, layers = facts.width, facts.tokens(clip.size, clip.frames), facts.config["num_layers"]
    flop = 2 * (2 if clip.guided else 1) * layers * tokens * (12 * width**2 + 2 * tokens * width)
    return clip.steps * flop / _rate(machine, compute_dtype(facts.family, machine))


def spelled_seconds(seconds: float) -> str:
    """Seconds for a reader, in minutes where there are some."""
    return f"{seconds / 60:.0f} minutes" if seconds >= 90 else f"{seconds:.0f} seconds"


def _rate(machine: Machine, dtype: torch.dtype) -> float:
    """FLOP/s of a matrix product on this machine, a third of which a whole forward reaches."""
    side = 4096 if machine.device.type == "cuda" else 512
    a = torch.ones(side, side, device=machine.device, dtype=dtype)
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        (a @ a).flatten()[0].item()
        best = min(best, time.perf_counter() - begin)
    return 2 * side**3 / best / 3


def _codec_line() -> str:
    try:
        from .video import find_codec
    except ImportError as error:  # numpy or Pillow
        raise InputError(f"{error.name}, needed for pictures") from error
    return f"video: {find_codec()}"


def _said(line: Callable[[], str]) -> str:
    try:
        return line()
    except InputError as error:
        return f"missing: {error}"
