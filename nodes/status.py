"""What this machine is about to do, in one line before sampling."""

import torch

from ..kernels import backend_line, tuning_seconds
from ..sixbit_core.config import DeltaCacheConfig, DMPQConfig
from ..sixbit_core.report import spelled_bytes
from .demand import Demand
from .machine import PATHS, path_of


def status_line(
    device: torch.device, dmpq: DMPQConfig | None, cache: DeltaCacheConfig | None, demand: Demand, free: int
) -> str:
    """Path, memory and tuning of the coming run.

    Args:
        device: that computes.
        dmpq: None where activations stay as they come.
        cache: with its location settled; None where no block is skipped.
        free: bytes on the device now.
    """
    words = [
        "activations as they come" if dmpq is None else f"{PATHS[path_of(device)]}, router {dmpq.router}"
    ]
    parts = [f"weights {spelled_bytes(demand.weights)}", f"sampling {spelled_bytes(demand.sampling)}"]
    needed = demand.weights + demand.sampling
    if cache is not None:
        held = demand.cache(cache.location)
        parts.append(f"delta cache up to {spelled_bytes(held)} ({cache.location})")
        needed += demand.cache_on_gpu(cache.location)
    words.append(f"needs {spelled_bytes(needed)} ({', '.join(parts)}), {spelled_bytes(free)} free")
    seconds = tuning_seconds(device) if dmpq is not None and dmpq.tune else 0
    words.append(f"tuning up to {seconds:.0f} s" if seconds else "tuning 0 s")
    return "6Bit: " + "; ".join([*words, backend_line()])
