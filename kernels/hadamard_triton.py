"""Triton twin of the block Hadamard rotation: a product with the sign matrix, made in registers.

Its fusions with quantization are in `int8_triton` and `nvfp4_triton`.
"""

import torch
import triton
import triton.language as tl

from .checks import check_block, check_float
from .formats_triton import hadamard_signs, rotate
from .hadamard import block_hadamard
from .support_triton import on_device, product_dtype, supported

ROWS = 64


@triton.jit
def block_hadamard_kernel(
    x_ptr,
    y_ptr,
    M,
    K,
    HADAMARD: tl.constexpr,
    FACTOR: tl.constexpr,
    PRODUCT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # grid: (ceil(M / BLOCK_M), ceil(K / BLOCK_K))
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    mask = (rows[:, None] < M) & (k < K)
    signs = hadamard_signs(HADAMARD, BLOCK_K, PRODUCT)
    offset = rows[:, None] * K + k
    y = rotate(tl.load(x_ptr + offset, mask=mask, other=0.0), signs, HADAMARD, FACTOR)
    tl.store(y_ptr + offset, y.to(y_ptr.dtype.element_ty), mask=mask)


@block_hadamard.register("triton", when=supported)
def block_hadamard_triton(x: torch.Tensor, block: int) -> torch.Tensor:
    check_float("block_hadamard", x, ndim=None)
    check_block("block_hadamard", x.shape[-1], block)
    if block <= 1 or x.numel() == 0:
        return x.clone()
    x = x.contiguous()
    y = torch.empty_like(x)
    K = x.shape[-1]
    M = x.numel() // K
    width = max(block, 16)
    with on_device(x):
        block_hadamard_kernel[(triton.cdiv(M, ROWS), triton.cdiv(K, width))](
            x,
            y,
            M,
            K,
            HADAMARD=block,
            FACTOR=block**-0.5,
            PRODUCT=product_dtype(x),
            BLOCK_M=ROWS,
            BLOCK_K=width,
            enable_fp_fusion=False,
        )
    return y
