"""What this machine is: device, number format, memory, versions."""

import importlib.metadata
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from ..sixbit_core import VERSION
from .errors import InputError

LIBRARIES = ("torch", "triton", "diffusers", "transformers")


@dataclass(frozen=True)
class Machine:
    """Where a run computes.

    Attributes:
        device: "cpu" or "cuda".
        name: what a reader would call it.
        memory_bytes: memory of the device in all.
        capability: compute capability of an NVIDIA GPU, else None.
    """

    device: torch.device
    name: str
    memory_bytes: int
    capability: tuple[int, int] | None = None


def find_machine(device: str = "auto") -> Machine:
    """The machine behind `--device auto|cpu|cuda`. Raises InputError for a device that is not there."""
    if device not in ("auto", "cpu", "cuda"):
        raise InputError(f"--device must be auto, cpu or cuda, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: torch sees no CUDA device here; use --device cpu or a CUDA torch")
    if device != "cpu" and torch.cuda.is_available():
        grow_segments()
        card = torch.cuda.get_device_properties(0)
        capability = None if torch.version.hip else (card.major, card.minor)
        return Machine(torch.device("cuda"), card.name, card.total_memory, capability)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    processor = platform.machine() or "processor"
    return Machine(torch.device("cpu"), f"{processor}, {cores} cores", _host_memory())


def grow_segments() -> None:
    """Let PyTorch's memory on a GPU grow in place, unless it was told otherwise; before it is first used.

    In segments of fixed sizes the loop of a 5B needs up to 1.1 GiB more than it holds.
    """
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the latter before PyTorch 2.9
    if sys.platform == "linux" and not torch.version.hip and not any(name in os.environ for name in names):
        os.environ[names[1]] = "expandable_segments:True"


def versions() -> dict[str, str]:
    """Versions of the libraries that decide a result."""
    found = {"sixbit": VERSION, "python": platform.python_version()}
    for library in LIBRARIES:
        try:
            found[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def reset_peak_memory(device: torch.device) -> None:
    """Start measuring peak memory anew, where the device counts it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def peak_memory_bytes(device: torch.device) -> int | None:
    """Peak of what the device held since the last reset; on a CPU, of the process; None where unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def free_bytes(device: torch.device) -> int | None:
    """What a GPU could still give, torch's own reserve included; None on a CPU."""
    if device.type != "cuda":
        return None
    reserve = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + reserve


def free_host_bytes() -> int:
    """Host memory that can be had now, what files only fill included; 0 where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:  # not Linux
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), 0)


def synchronize(device: torch.device) -> None:
    """Wait for the device, so that a clock reads what was really done."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def _host_memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0
