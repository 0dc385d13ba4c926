"""Linear layers over an NVFP4 weight, by the format of the activations.

    w4a16:  y = x W^T + b              activations as they come
    w4a8:   y = Q8(x) Q8(W)^T + b      per-row INT8 activations, the weight cast per channel
    w4a4:   y = Q4(x) W^T + b          per-row NVFP4 activations

W is the decoded weight. Where `hadamard` is above 1 the weight is stored rotated along K in blocks of that
size, and x is rotated likewise before anything else. Sums and the bias are float32; the result is rounded
once to the type of x.
"""

from __future__ import annotations

import torch

from .cast import int8_weight
from .checks import check_block, check_float, check_nvfp4, describe
from .dispatch import Op
from .hadamard import block_hadamard, hadamard_quantize_int8, hadamard_quantize_nvfp4
from .nvfp4 import dequantize_nvfp4


@Op
def linear_w4a16(
    x: torch.Tensor,
    data: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    hadamard: int = 0,
) -> torch.Tensor:
    """Linear layer with activations in the type they come in.

    Args:
        x: (M, K) float16, bfloat16 or float32.
        data, scale, global_scale: NVFP4 weight (N, K), see `nvfp4`. Where x is on a GPU, data and scale may
            lie in pinned host memory: Triton's twin reads them there, the others copy them, without a wait.
        bias: (N,) of a floating-point type, or None.
        hadamard: block in which the weight is stored rotated; 0 or 1 if it is not.

    Returns:
        (M, N) in the type of x.

    Raises:
        ValueError: if types or shapes do not belong together.
    """
    check_linear("linear_w4a16", x, data, scale, global_scale, bias, hadamard)
    rotated = block_hadamard(x.float(), hadamard)
    y = rotated @ dequantize_nvfp4(*beside(x, data, scale), global_scale).T
    return _finish(y, bias, x.dtype)


@Op
def linear_w4a8(
    x: torch.Tensor,
    data: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    hadamard: int = 0,
) -> torch.Tensor:
    """Linear layer with per-row INT8 activations; all on one device, else as `linear_w4a16`."""
    check_linear("linear_w4a8", x, data, scale, global_scale, bias, hadamard)
    q, row_scale = hadamard_quantize_int8(x, hadamard)
    return int8_linear(q, row_scale, *int8_weight([(data, scale, global_scale)]), bias, x.dtype)


@Op
def int8_linear(
    q: torch.Tensor,
    row_scale: torch.Tensor,
    channels: torch.Tensor,
    channel_scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The product of `linear_w4a8`, its input quantized and its weight cast already.

    Args:
        q: (M, K) int8 and `row_scale` (M, 1) float32, as `hadamard_quantize_int8` gives them, rotated as the
            weight is.
        channels: (N, K) int8 and `channel_scale` (N, 1) float32, as `int8_weight` gives them.
        bias: (N,) of a floating-point type, or None.
        dtype: float16, bfloat16 or float32.

    Returns:
        (M, N) of `dtype`.

    Raises:
        ValueError: if types or shapes do not belong together.
    """
    check_int8_linear(q, row_scale, channels, channel_scale, bias)
    y = (q.float() @ channels.float().T) * row_scale * channel_scale.T
    return _finish(y, bias, dtype)


@Op
def linear_w4a4(
    x: torch.Tensor,
    data: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    hadamard: int = 0,
) -> torch.Tensor:
    """Linear layer with per-row NVFP4 activations; all on one device, else as `linear_w4a16`."""
    check_linear("linear_w4a4", x, data, scale, global_scale, bias, hadamard)
    rounded = dequantize_nvfp4(*hadamard_quantize_nvfp4(x, hadamard))
    y = rounded @ dequantize_nvfp4(data, scale, global_scale).T
    return _finish(y, bias, x.dtype)


def check_linear(
    name: str,
    x: torch.Tensor,
    data: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor,
    bias: torch.Tensor | None,
    hadamard: int,
) -> None:
    """What the three linears and their twins refuse."""
    check_float(name, x, ndim=2)
    check_nvfp4(name, data, scale, global_scale)
    check_block(name, x.shape[1], hadamard)
    if x.shape[1] != data.shape[1] * 2:
        raise ValueError(
            f"{name} needs x with {data.shape[1] * 2} columns, as the weight has, got {describe(x)}"
        )
    _check_bias(name, bias, data.shape[0])


def check_int8_linear(
    q: torch.Tensor,
    row_scale: torch.Tensor,
    channels: torch.Tensor,
    channel_scale: torch.Tensor,
    bias: torch.Tensor | None,
) -> None:
    """What `int8_linear` and its twins refuse."""
    name = "int8_linear"
    for what, x, scale in (("q", q, row_scale), ("channels", channels, channel_scale)):
        if x.dtype != torch.int8 or x.ndim != 2:
            raise ValueError(f"{name} needs {what} as a 2-D int8 tensor, got {describe(x)}")
        if scale.dtype != torch.float32 or scale.shape != (x.shape[0], 1):
            raise ValueError(
                f"{name} needs the scale of {what} as float32 {(x.shape[0], 1)}, got {describe(scale)}"
            )
    if q.shape[1] != channels.shape[1]:
        raise ValueError(f"{name} needs q with {channels.shape[1]} columns, as channels, got {describe(q)}")
    _check_bias(name, bias, channels.shape[0])


def beside(x: torch.Tensor, data: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`data` and `scale` on the device of `x`."""
    return data.to(x.device, non_blocking=True), scale.to(x.device, non_blocking=True)


def _check_bias(name: str, bias: torch.Tensor | None, columns: int) -> None:
    if bias is not None and (bias.shape != (columns,) or not bias.is_floating_point()):
        raise ValueError(f"{name} needs bias as a float tensor {(columns,)}, got {describe(bias)}")


def _finish(y: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    return (y if bias is None else y + bias.float()).to(dtype)
