"""Symmetric INT8 with one scale per row: the contract, in plain PyTorch.

    amax[m]  = max_k |x[m, k]|
    scale[m] = amax[m] / 127
    q[m, k]  = round_half_even(x[m, k] * (127 / amax[m]))

Both quotients are float32; the product is exact before it is rounded, as a fused multiply-add has it (and
float64 holds it). A GPU divides ten times as slowly as it multiplies, and this happens to every activation.

These functions are the specification. `rows_triton` holds twins with the same names and signatures, and the
tests hold every twin to these. A row that holds something not finite gets scale = NaN, so that whatever
is computed from it is NaN; its codes mean nothing.
"""

from __future__ import annotations

import torch

from .checks import check_float
from .dispatch import Op

INT8_MAX = 127.0
SMALLEST_SCALE = 2.0**-126  # a row whose scale would lie below this counts as zeros
_CHUNK = 1 << 22  # values at a time, since float64 copies of many rows are large


@Op
def quantize_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize each row of `x` to INT8.

    Args:
        x: (M, K) float16, bfloat16 or float32, any strides.

    Returns:
        q: (M, K) int8 in [-127, 127].
        scale: (M, 1) float32; 1.0 for a row of zeros, NaN for a row that is not finite, whose codes mean
            nothing. `q * scale` restores `x`.

    Raises:
        ValueError: if `x` is not a 2-D floating-point tensor.
    """
    check_float("quantize_int8", x, ndim=2)
    return quantize_rows(x, 1.0)


def quantize_rows(x: torch.Tensor, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize_int8` of `factor` times `x`: the codes are those of x, the factor goes into the scale."""
    amax = x.abs().amax(dim=1, keepdim=True).float()
    scale, inverse = row_scales(amax, factor)
    finite = torch.isfinite(amax)
    rows = max(1, _CHUNK // max(1, x.shape[1]))
    q = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    for i in range(0, x.shape[0], rows):
        part = slice(i, i + rows)
        scaled = torch.where(finite[part], x[part].double(), 0.0) * inverse[part]
        q[part] = scaled.round_().to(torch.int8)
    return q, scale


def row_scales(amax: torch.Tensor, factor: torch.Tensor | float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """From largest magnitudes (M, 1) float32: scales, times `factor`, and what values are multiplied by."""
    largest = torch.full_like(amax, INT8_MAX)  # a tensor: on CUDA a number would be a reciprocal
    scale = amax / largest
    finite, used = torch.isfinite(amax), scale >= SMALLEST_SCALE
    inverse = torch.where(finite & used, largest / amax, 0.0)
    return torch.where(finite, torch.where(used, scale * factor, 1.0), torch.nan), inverse
