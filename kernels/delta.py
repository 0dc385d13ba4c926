"""The step that stands in for a skipped block:  y = x + delta, added in float32, rounded to the type of x."""

from __future__ import annotations

import torch

from .checks import check_float, describe
from .dispatch import Op


@Op
def apply_delta(x: torch.Tensor, delta: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Add a stored residual.

    Args:
        x: float16, bfloat16 or float32, any shape but ().
        delta: same shape; float16, bfloat16 or float32.
        out: a contiguous tensor like `x` to write to, in place of a new one.

    Returns:
        A tensor of the shape and type of `x`; `out` if given.

    Raises:
        ValueError: if types are no floats or shapes differ.
    """
    check_delta(x, delta, out)
    made = x + delta if x.dtype == delta.dtype else (x.float() + delta.float()).to(x.dtype)
    return made if out is None else out.copy_(made)


def check_delta(x: torch.Tensor, delta: torch.Tensor, out: torch.Tensor | None) -> None:
    """What `apply_delta` and its twins refuse."""
    check_float("apply_delta", x, ndim=None)
    check_float("apply_delta", delta, ndim=None)
    if x.shape != delta.shape:
        raise ValueError(f"apply_delta needs tensors of one shape, got {describe(x)} and {describe(delta)}")
    if out is not None and not (out.shape == x.shape and out.dtype == x.dtype and out.is_contiguous()):
        raise ValueError(f"apply_delta needs out as contiguous {describe(x)}, got {describe(out)}")
