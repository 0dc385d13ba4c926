"""Triton twins of INT8 quantization, with and without a Hadamard rotation before it.

One program takes a few rows and reads them twice: once for the maxima, once to quantize. The second read
comes from the cache, so that any K fits.
"""

import torch
import triton
import triton.language as tl

from .checks import check_block, check_float
from .formats_triton import (
    finite_abs,
    hadamard_signs,
    int8_of_product,
    inverse_of_amax,
    rotate,
    scale_from_amax,
)
from .hadamard import hadamard_quantize_int8
from .int8 import INT8_MAX, quantize_int8
from .support_triton import on_device, product_dtype, rows_contiguous, supported

ROWS = 16  # rows of a program: the least that a product takes
COLUMNS = 128  # columns at a time where nothing is rotated


@triton.jit
def quantize_int8_kernel(
    x_ptr,
    q_ptr,
    scale_ptr,
    M,
    K,
    x_row_stride,
    INT8_MAX: tl.constexpr,
    HADAMARD: tl.constexpr,
    FACTOR: tl.constexpr,
    PRODUCT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # grid: (ceil(M / BLOCK_M),)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_K)
    signs = hadamard_signs(HADAMARD, BLOCK_K, PRODUCT)
    x_rows = x_ptr + rows[:, None] * x_row_stride

    amax = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + columns[None, :]
        mask = (rows[:, None] < M) & (k < K)
        y = rotate(tl.load(x_rows + k, mask=mask, other=0.0), signs, HADAMARD, FACTOR)
        amax = tl.maximum(amax, tl.max(finite_abs(y), axis=1))
    scale = scale_from_amax(amax, INT8_MAX)
    tl.store(scale_ptr + rows, scale, mask=rows < M)

    finite = (scale == scale)[:, None]
    inverse = tl.broadcast_to(inverse_of_amax(amax, scale, INT8_MAX)[:, None], (BLOCK_M, BLOCK_K))
    for start in range(0, K, BLOCK_K):
        k = start + columns[None, :]
        mask = (rows[:, None] < M) & (k < K)
        y = rotate(tl.load(x_rows + k, mask=mask, other=0.0), signs, HADAMARD, FACTOR)
        q = tl.where(finite, int8_of_product(y, inverse), 0)
        tl.store(q_ptr + rows[:, None] * K + k, q, mask=mask)


@quantize_int8.register("triton", when=supported)
def quantize_int8_triton(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    check_float("quantize_int8", x, ndim=2)
    return _launch(x, hadamard=1)


@hadamard_quantize_int8.register("triton", when=supported)
def hadamard_quantize_int8_triton(x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    check_float("hadamard_quantize_int8", x, ndim=2)
    check_block("hadamard_quantize_int8", x.shape[1], block)
    return _launch(x, hadamard=max(block, 1))


def _launch(x: torch.Tensor, hadamard: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = rows_contiguous(x)
    M, K = x.shape
    q = torch.empty((M, K), dtype=torch.int8, device=x.device)
    scale = torch.empty((M, 1), dtype=torch.float32, device=x.device)
    if M == 0:
        return q, scale
    with on_device(x):
        quantize_int8_kernel[(triton.cdiv(M, ROWS),)](
            x,
            q,
            scale,
            M,
            K,
            x.stride(0),
            INT8_MAX=INT8_MAX,
            HADAMARD=hadamard,
            FACTOR=hadamard**-0.5,
            PRODUCT=product_dtype(x),
            BLOCK_M=ROWS,
            BLOCK_K=max(hadamard, 16) if hadamard > 1 else COLUMNS,
            enable_fp_fusion=False,
        )
    return q, scale
