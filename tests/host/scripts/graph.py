"""What the scripts of sampling runs share: the nodes, and a tiny model sampled through the stock KSampler."""

from boot import ARGUMENTS, answer, pack  # isort: split

import hashlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import comfy.model_management
import folder_paths
import torch

import nodes

folder_paths.folder_names_and_paths["diffusion_models"] = ([ARGUMENTS["folder"]], {".safetensors"})
LOAD = pack("nodes.load")
BRIDGE = pack("nodes.bridge")
TDC = pack("nodes.delta_cache").SixBitTemporalDeltaCache
DMPQ = pack("nodes.dmpq").SixBitApplyDMPQ
CHECKS: dict[str, Callable] = {}
STEPS = 8


def check(function: Callable) -> Callable:
    """Decorator: an entry of the answer."""
    CHECKS[function.__name__] = function
    return function


def text(seed: int, length: int = 16) -> list:
    return [[torch.randn((1, length, 32), generator=torch.Generator().manual_seed(seed)), {}]]


def sample(
    model,
    seed: int = 0,
    steps: int = STEPS,
    cfg: float = 6.0,
    sampler: str = "euler",
    scheduler: str = "simple",
    batch: int = 1,
    size: tuple[int, int, int] = (3, 8, 12),
    positive: list | None = None,
    batch_index: list[int] | None = None,
    **rest: object,
) -> torch.Tensor:
    latent = {"samples": torch.zeros(batch, 4, *size)}
    if batch_index is not None:
        latent["batch_index"] = batch_index
    positive = positive or text(1)
    return nodes.common_ksampler(
        model, seed, steps, cfg, sampler, scheduler, positive, text(2), latent, **rest
    )[0]["samples"]


def load(name: str = "tiny/", weights: str = "as stored"):
    return LOAD.SixBitLoadCogVideoX.execute(name, weights).args[0]


def cached(model, **values: object):
    return TDC.execute(model, "balanced", **{"threshold": 0.9, "start": 0.1, **values}).args[0]


def six_bit_run() -> torch.Tensor:
    """A run with everything on, for comparing processes."""
    model = DMPQ.execute(load("tiny/", "6-bit"), "balanced", compute="emulate", router="random").args[0]
    return sample(cached(model), seed=11)


def report(model) -> object:
    found = BRIDGE.settings_of(model).journal.last
    return None if found is None else found.report


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a, b) and bool(torch.isfinite(a).all())


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def clean(model) -> bool:
    """Nothing of a run is left on the modules."""
    own = [module.__dict__ for module in model.model.diffusion_model.modules()]
    return not any({"forward", "product", "branch"} & set(names) for names in own)


@contextmanager
def log_lines() -> Iterator[list[str]]:
    """What is logged inside."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    root, level = logging.getLogger(), logging.getLogger().level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        root.removeHandler(handler)
        root.setLevel(level)


def run_checks(**more: Callable) -> None:
    """Answer with what every check gave, and with `more`."""
    results = {}
    with torch.inference_mode():
        for name, function in CHECKS.items():
            comfy.model_management.unload_all_models()
            start = time.monotonic()
            try:
                results[name] = function()
                print(f"{name}: {time.monotonic() - start:.1f} s", file=sys.stderr)
            except Exception as error:
                logging.exception(name)
                results[name] = f"{type(error).__name__}: {error}"
        answer(results=results, **{name: function() for name, function in more.items()})


def digest() -> str:
    """Of `six_bit_run`."""
    return hashlib.sha256(six_bit_run().numpy().tobytes()).hexdigest()
