"""What this machine is about to do, in one line before sampling."""

import torch

from ..kernels import backend_line, tuning_seconds
from ..sixbit_core.config import DeltaCacheConfig, DMPQConfig
from .machine import PATHS, path_of
from .memory import Demand


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
    parts = [f"weights {_size(demand.weights)}", f"sampling {_size(demand.sampling)}"]
    needed = demand.weights + demand.sampling
    if cache is not None:
        parts.append(f"delta cache up to {_size(demand.cache(cache.location))} ({cache.location})")
        needed += demand.cache_on_gpu(cache.location)
    words.append(f"needs {_size(needed)} ({', '.join(parts)}), {_size(free)} free")
    seconds = tuning_seconds(device) if dmpq is not None and dmpq.tune else 0
    words.append(f"tuning up to {seconds:.0f} s" if seconds else "tuning 0 s")
    return "6Bit: " + "; ".join([*words, backend_line()])


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
