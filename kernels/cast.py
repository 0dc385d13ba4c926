"""An NVFP4 weight as INT8, so that it can meet INT8 activations in one integer product.

    w[n, k]  = decoded NVFP4 value, float32
    scale[n] = amax_k |w[n, k]| / 127
    q[n, k]  = round_half_even(w[n, k] / scale[n])

One scale per output channel costs almost nothing in accuracy: the relative error of a Gaussian weight with
searched block scales goes from 8.35 to 8.40 % (K = 1920, `tests/kernels/test_cast.py`). The cast runs once
per call, or once a block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .checks import check_nvfp4, describe
from .dispatch import Op
from .int8 import quantize_int8
from .nvfp4 import dequantize_nvfp4

Weight = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # data, scale, global_scale


def int8_weight(weights: Sequence[Weight]) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast the NVFP4 weights (N_i, K) of linears with one input, side by side, as `int8_linear` takes them.

    Returns:
        (sum of N_i, K) int8, and the scale of each output channel, (sum of N_i, 1) float32.

    Raises:
        ValueError: as `cast_nvfp4_to_int8`.
    """
    if len(weights) == 1:
        return cast_nvfp4_to_int8(*weights[0])
    sizes = [data.shape[0] for data, _, _ in weights]
    first = weights[0][0]
    values = torch.empty((sum(sizes), first.shape[1] * 2), dtype=torch.int8, device=first.device)
    parts = zip(weights, values.split(sizes), strict=True)
    return values, torch.cat([cast_nvfp4_to_int8(*weight, out=part)[1] for weight, part in parts])


@Op
def cast_nvfp4_to_int8(
    data: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast an NVFP4 weight to INT8 with one scale per output channel.

    Args:
        data: (N, K/2) uint8.
        scale: (N, K/16) float8_e4m3fn.
        global_scale: float32 () or (N, 1).
        out: (N, K) int8, contiguous, to write the values to; a new tensor if None.

    Returns:
        q: (N, K) int8 (`out` if given).
        scale: (N, 1) float32.

    Raises:
        ValueError: if the three do not belong together, or `out` has another shape or type.
    """
    check_cast(data, scale, global_scale, out)
    q, channel_scale = quantize_int8(dequantize_nvfp4(data, scale, global_scale))
    return (q if out is None else out.copy_(q)), channel_scale


def check_cast(
    data: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor, out: torch.Tensor | None
) -> None:
    """What `cast_nvfp4_to_int8` and its twins refuse."""
    check_nvfp4("cast_nvfp4_to_int8", data, scale, global_scale)
    shape = (data.shape[0], data.shape[1] * 2)
    if out is not None and (out.shape != shape or out.dtype != torch.int8 or not out.is_contiguous()):
        raise ValueError(f"cast_nvfp4_to_int8 needs out as contiguous int8 {shape}, got {describe(out)}")
