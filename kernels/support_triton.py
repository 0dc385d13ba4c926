"""Whether the Triton twins can run on a tensor's device, and why not where they cannot.

Having Triton installed is not enough: it needs a C compiler for its launcher and a GPU that it supports. One
tiny kernel tells, run first in a process that may die of it (`probe`), then once per device in this one; the
reason of a failure is kept and shown.
"""

import errno
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from subprocess import CalledProcessError

import torch
import triton
import triton.language as tl
from triton.errors import TritonError
from triton.runtime.errors import OutOfResources

from . import probe

TRITON_VERSION = triton.__version__
UNFIT = (OutOfResources,)  # a configuration that takes more shared memory or registers than the GPU has
OLDEST_CAPABILITY = (8, 0)  # INT8 products do not compile below

# How Triton says that it cannot work here: a kernel or ptxas that it cannot compile; a C compiler that is
# missing (RuntimeError, OSError) or fails (CalledProcessError); a launcher that cannot be loaded; a driver
# that refuses the kernel (RuntimeError).
UNABLE = (TritonError, RuntimeError, OSError, ImportError, CalledProcessError)
PASSING_OS_ERRORS = {errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.EAGAIN}
PASSING = ("out of memory", "busy or unavailable")  # the latter: a GPU that serves one process at a time
# torch.AcceleratorError, an earlier kernel's fault, is a plain RuntimeError before PyTorch 2.8.
CRASHED = (torch.cuda.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.cuda.OutOfMemoryError))


@triton.jit
def _probe_kernel(out_ptr):
    # grid: (1,)
    tl.store(out_ptr + tl.program_id(0), 1.0)


def supported(*args: object, **kwargs: object) -> bool:
    """Whether twins run where these arguments of an op lie: the `when` of every twin.

    The tensors of a call share a device, so the first tells. On the CPU twins run only inside `use_backend`,
    interpreted.
    """
    x = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
    return x.is_cuda and not reason_against(x.device.index)


@cache
def reason_against(device: int) -> str:
    """Why twins do not run on this CUDA device, or "" where they do: asked once, unless that itself fails.

    Raises:
        RuntimeError, OSError: if memory, disk or the GPU failed, which says nothing about Triton. It is not
            remembered: the next call asks again.
    """
    if torch.version.hip is not None:
        return "the Triton kernels are not tested on AMD GPUs"
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST_CAPABILITY:
        return f"the Triton kernels need compute capability 8.0, this GPU has {capability[0]}.{capability[1]}"
    found = probe.verdict(device, triton.__version__, kept("probe.json")) or failure(device)
    return found and f"Triton {triton.__version__} does not run here: {found}"


def failure(device: int) -> str:
    """Launch one kernel here: "" or the last line of what went wrong. Raises as `reason_against`."""
    try:
        _probe(device)
    except UNABLE as error:
        if _is_passing(error):
            raise
        return (str(error).strip().splitlines() or [type(error).__name__])[-1]
    return ""


def kept(name: str) -> Path:
    """A file of ours in Triton's own cache, which goes with it."""
    return Path(triton.knobs.cache.dir) / "sixbit" / name


def _probe(device: int) -> None:
    """Compile, load and launch one kernel."""
    with torch.cuda.device(device):
        _probe_kernel[(1,)](torch.empty(1, device="cuda"))


def _is_passing(error: Exception) -> bool:
    """Whether this error tells of the moment (or of a GPU that has crashed) rather than of the machine."""
    if isinstance(error, OSError):
        return error.errno in PASSING_OS_ERRORS
    return isinstance(error, CRASHED) or any(words in str(error) for words in PASSING)


def on_device(x: torch.Tensor) -> AbstractContextManager:
    """Make the device of `x` current, where Triton launches."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def rows_contiguous(x: torch.Tensor) -> torch.Tensor:
    """`x`, copied unless its last axis is contiguous: the kernels take any stride between rows only."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def product_dtype(x: torch.Tensor) -> tl.dtype:
    """The type in which a kernel multiplies values of `x`: its own, but float32 on the CPU.

    The interpreter multiplies the bits of bfloat16 numbers instead of their values (Triton 3.9).
    """
    types = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
    return types[x.dtype] if x.is_cuda else tl.float32


def status() -> str:
    """One clause about Triton on the current machine."""
    if not torch.cuda.is_available():
        return f"Triton {triton.__version__} is installed, but there is no CUDA GPU"
    device = torch.cuda.current_device()
    name = torch.cuda.get_device_name(device)
    reason = reason_against(device)
    return f"on {name} {reason}" if reason else f"Triton {triton.__version__} kernels on {name}"
