"""Symmetric INT8 with one scale per row: the contract, in plain PyTorch.

    scale[m] = amax_k |x[m, k]| / 127
    q[m, k]  = round_half_even(x[m, k] / scale[m])

These functions are the specification. `int8_triton` holds twins with the same names and signatures, and the
tests hold every twin to these. A row that holds something not finite gets q = 0 and scale = NaN, so that
whatever is computed from it is NaN.
"""

from __future__ import annotations

import torch

from .checks import check_float
from .dispatch import Op

INT8_MAX = 127.0
SMALLEST_SCALE = 2.0**-126  # a row whose scale would lie below this counts as zeros


@Op
def quantize_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize each row of `x` to INT8.

    Args:
        x: (M, K) float16, bfloat16 or float32, any strides.

    Returns:
        q: (M, K) int8 in [-127, 127].
        scale: (M, 1) float32; 1.0 for a row of zeros, NaN for a row that is not finite. `q * scale`
            restores `x`.

    Raises:
        ValueError: if `x` is not a 2-D floating-point tensor.
    """
    check_float("quantize_int8", x, ndim=2)
    x = x.float()
    amax = x.abs().amax(dim=1, keepdim=True)
    finite = torch.isfinite(amax)
    scale = amax / torch.full_like(amax, INT8_MAX)  # a tensor: on CUDA a number would be a reciprocal
    scale = torch.where(scale >= SMALLEST_SCALE, scale, 1.0)
    q = (x / scale).round_().to(torch.int8)
    return torch.where(finite, q, 0), torch.where(finite, scale, torch.nan)
