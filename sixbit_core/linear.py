"""Mixed-precision linear: y = Q_format(x H) (Q_nvfp4(W H))ᵀ + bias, the format chosen per call."""

import torch

from .formats import FORMATS
from .quantized import QuantizedWeight


def mixed_linear(
    x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None, format_name: str
) -> torch.Tensor:
    """A linear whose weight is NVFP4 and whose activations take the named format.

    Args:
        x: (..., K) float16, bfloat16 or float32.
        weight: NVFP4, (N, K).
        bias: (N,) or None.
        format_name: "nvfp4", "int8" or "bf16" (activations as they come, the weight decoded).

    Returns:
        (..., N) in x.dtype.

    Raises:
        ValueError: for an unknown format, or an `x` that is not K wide.
    """
    if format_name not in FORMATS:
        raise ValueError(f"activation format must be one of {', '.join(FORMATS)}, got {format_name!r}")
    if x.shape[-1] != weight.in_features:
        raise ValueError(f"input of this linear must be {weight.in_features} wide, got {tuple(x.shape)}")
    rows = x.reshape(-1, x.shape[-1])
    return FORMATS[format_name].linear(rows, weight, bias).reshape(*x.shape[:-1], weight.out_features)
