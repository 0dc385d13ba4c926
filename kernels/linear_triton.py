"""Triton twins of the linear layers: quantize, bring the weight to a type with a fast product, multiply.

The weight is converted once per call, never inside the product, which at tens of thousands of rows would
convert it again for every tile of rows. It goes into a new tensor: PyTorch's allocator hands the block of the
call before out again, safely for every stream, where a buffer of our own would outlive the run.

In `linear_w4a16` the decoder rotates the weight back, in its registers, and x is taken as it comes. Rounded
to float16, x H overflows (a block of 128 values of 5,900 has a first coefficient of 66,751) where the weight
does not. And it saves a pass over x, which has more rows than the weight.
"""

import torch

from .cast_triton import cast_nvfp4_to_int8_triton
from .gemm_triton import capability_of, fp4_gemm, has_fp4, scaled_gemm
from .linear import (
    beside,
    check_int8_linear,
    check_linear,
    int8_linear,
    linear_w4a4,
    linear_w4a8,
    linear_w4a16,
)
from .nvfp4_decode_triton import decode
from .nvfp4_triton import hadamard_quantize_nvfp4_triton
from .rows_triton import hadamard_quantize_int8_triton
from .support_triton import supported


def _has_rows(x: torch.Tensor, *args: object, **kwargs: object) -> bool:
    return supported(x) and x.shape[0] > 0


@linear_w4a16.register("triton", when=_has_rows)
def linear_w4a16_triton(
    x: torch.Tensor,
    data: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    hadamard: int = 0,
) -> torch.Tensor:
    check_linear("linear_w4a16", x, data, scale, global_scale, bias, hadamard)
    if not (data.is_cuda or data.is_pinned()):  # what a GPU cannot read
        data, scale = beside(x, data, scale)
    weight = decode(data, scale, global_scale, x.dtype, hadamard, x.device)
    return torch.nn.functional.linear(x, weight, None if bias is None else bias.to(x.dtype))


@linear_w4a8.register("triton", when=_has_rows)
def linear_w4a8_triton(
    x: torch.Tensor,
    data: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    hadamard: int = 0,
) -> torch.Tensor:
    check_linear("linear_w4a8", x, data, scale, global_scale, bias, hadamard)
    q, row_scale = hadamard_quantize_int8_triton(x, hadamard)
    cast = cast_nvfp4_to_int8_triton(data, scale, global_scale)
    return int8_linear_triton(q, row_scale, *cast, bias, x.dtype)


@int8_linear.register("triton", when=_has_rows)
def int8_linear_triton(
    q: torch.Tensor,
    row_scale: torch.Tensor,
    channels: torch.Tensor,
    channel_scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    check_int8_linear(q, row_scale, channels, channel_scale, bias)
    operands = (q, channels, row_scale, channel_scale)
    return scaled_gemm(*(one.contiguous() for one in operands), bias, dtype)


@linear_w4a4.register("triton", when=_has_rows)
def linear_w4a4_triton(
    x: torch.Tensor,
    data: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    hadamard: int = 0,
) -> torch.Tensor:
    check_linear("linear_w4a4", x, data, scale, global_scale, bias, hadamard)
    x_data, x_scale, row_scale = hadamard_quantize_nvfp4_triton(x, hadamard)
    data, scale, global_scale = data.contiguous(), scale.contiguous(), global_scale.contiguous()
    if has_fp4(capability_of(x)):
        return fp4_gemm(x_data, x_scale, data, scale, row_scale, global_scale, bias, x.dtype)
    # Without FP4 units: e2m1 * scale has six significant bits, so bfloat16 holds it exactly. The interpreter
    # cannot multiply bfloat16.
    dtype = torch.bfloat16 if x.is_cuda else torch.float32
    a = decode(x_data, x_scale, None, dtype)
    b = decode(data, scale, None, dtype)
    return scaled_gemm(a, b, row_scale, global_scale, bias, x.dtype)
