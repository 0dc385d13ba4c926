"""Triton twins of NVFP4 quantization, with and without a Hadamard rotation before it.

Per row, one program takes a few rows and reads them twice: once for the maxima, which give the global scales,
once to quantize. Where the global scale is given or the tensor's, the row maxima are a pass of their own.
"""

import torch
import triton
import triton.language as tl

from .checks import check_block, check_float, check_nvfp4_columns
from .formats_triton import (
    decode_e4m3,
    encode_e2m1,
    encode_e4m3,
    finite_abs,
    hadamard_signs,
    rotate,
    round_e2m1,
    scale_from_amax,
)
from .hadamard import hadamard_quantize_nvfp4
from .nvfp4 import (
    ROUNDINGS,
    SCALE_RANGE,
    check_quantize,
    global_scale_of,
    quantize_nvfp4,
)
from .support_triton import on_device, product_dtype, rows_contiguous, supported

ROWS = 16  # rows of a program: the least that a product takes
CHOOSING_ROWS = 8  # rows where block scales are chosen among several: more spills registers
COLUMNS = 128  # columns at a time where nothing is rotated


@triton.jit
def _scale_codes(amax, global_scale, LARGEST: tl.constexpr):
    """int32 E4M3 codes of amax / LARGEST / global_scale, saturating at 448."""
    block_scale = tl.div_rn(amax, tl.full(amax.shape, LARGEST, tl.float32))
    return encode_e4m3(tl.minimum(tl.div_rn(block_scale, global_scale), 448.0))


@triton.jit
def _block_total(code, global_scale):
    """What values of a block are divided by: infinity, giving zeros, where its scale is zero."""
    total = decode_e4m3(code) * global_scale
    return tl.where(total > 0, total, float("inf"))


@triton.jit
def _squared_error(y, code, global_scale):
    """Squared error of each block (last axis) with this code."""
    magnitude = tl.abs(y)
    total = tl.broadcast_to(_block_total(code, global_scale)[:, :, None], y.shape)
    rounded = round_e2m1(tl.div_rn(magnitude, total))
    restored = rounded * tl.where(total < float("inf"), total, 0.0)
    return tl.sum((restored - magnitude) * (restored - magnitude), axis=2)


@triton.jit
def _best_code(y, amax, code, global_scale, ROUNDING: tl.constexpr):
    """The block scale that `quantize_nvfp4` asks for, from the nearest one."""
    if ROUNDING == 0:
        return code
    best = code
    best_error = _squared_error(y, code, global_scale)
    if ROUNDING == 1:
        other = _scale_codes(amax, global_scale, 4.0)
        best = tl.where(_squared_error(y, other, global_scale) < best_error, other, best)
    else:
        for i in tl.static_range(1, 8):  # offsets 1, -1, 2, -2, 3, -3, 4
            offset = ((i + 1) // 2) * (2 * (i % 2) - 1)
            other = tl.minimum(tl.maximum(code + offset, 0), 0x7E)
            error = _squared_error(y, other, global_scale)
            best = tl.where(error < best_error, other, best)
            best_error = tl.minimum(error, best_error)
    return best


@triton.jit
def row_amax_kernel(x_ptr, amax_ptr, M, K, x_row_stride, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    # grid: (ceil(M / BLOCK_M),)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    amax = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)[None, :]
        mask = (rows[:, None] < M) & (k < K)
        x = tl.load(x_ptr + rows[:, None] * x_row_stride + k, mask=mask, other=0.0).to(tl.float32)
        amax = tl.maximum(amax, tl.max(finite_abs(x), axis=1))
    tl.store(amax_ptr + rows, amax, mask=rows < M)


@triton.jit
def quantize_nvfp4_kernel(
    x_ptr,
    data_ptr,
    scale_ptr,
    global_ptr,
    M,
    K,
    x_row_stride,
    global_stride,
    SCALE_RANGE: tl.constexpr,
    GIVEN_GLOBAL: tl.constexpr,
    ROUNDING: tl.constexpr,
    HADAMARD: tl.constexpr,
    FACTOR: tl.constexpr,
    PRODUCT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # grid: (ceil(M / BLOCK_M),). global_ptr is read if GIVEN_GLOBAL, else written.
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_K)
    signs = hadamard_signs(HADAMARD, BLOCK_K, PRODUCT)
    x_rows = x_ptr + rows[:, None] * x_row_stride

    if GIVEN_GLOBAL:
        global_scale = tl.load(global_ptr + rows * global_stride, mask=rows < M, other=1.0)
    else:
        row_amax = tl.zeros((BLOCK_M,), tl.float32)
        for start in range(0, K, BLOCK_K):
            k = start + columns[None, :]
            mask = (rows[:, None] < M) & (k < K)
            y = rotate(tl.load(x_rows + k, mask=mask, other=0.0), signs, HADAMARD, FACTOR)
            row_amax = tl.maximum(row_amax, tl.max(finite_abs(y), axis=1))
        global_scale = scale_from_amax(row_amax, SCALE_RANGE)
        tl.store(global_ptr + rows, global_scale, mask=rows < M)

    finite = (global_scale == global_scale)[:, None]
    safe = tl.where(global_scale == global_scale, global_scale, 1.0)
    safe = tl.broadcast_to(safe[:, None], (BLOCK_M, BLOCK_K // 16))
    for start in range(0, K, BLOCK_K):
        k = start + columns[None, :]
        mask = (rows[:, None] < M) & (k < K)
        y = rotate(tl.load(x_rows + k, mask=mask, other=0.0), signs, HADAMARD, FACTOR)
        y = tl.reshape(tl.where(finite, y, 0.0), (BLOCK_M, BLOCK_K // 16, 16))
        amax = tl.max(tl.abs(y), axis=2)
        code = _best_code(y, amax, _scale_codes(amax, safe, 6.0), safe, ROUNDING)
        total = tl.broadcast_to(_block_total(code, safe)[:, :, None], (BLOCK_M, BLOCK_K // 16, 16))
        scaled = tl.where(total < float("inf"), tl.div_rn(y, total), 0.0)
        even, odd = tl.split(tl.reshape(encode_e2m1(scaled), (BLOCK_M, BLOCK_K // 2, 2)))

        byte = start // 2 + tl.arange(0, BLOCK_K // 2)[None, :]
        byte_mask = (rows[:, None] < M) & (byte < K // 2)
        data = ((even << 4) | odd).to(tl.uint8)
        tl.store(data_ptr + rows[:, None] * (K // 2) + byte, data, mask=byte_mask)
        block = start // 16 + tl.arange(0, BLOCK_K // 16)[None, :]
        block_mask = (rows[:, None] < M) & (block < K // 16)
        tl.store(scale_ptr + rows[:, None] * (K // 16) + block, code.to(tl.uint8), mask=block_mask)


@quantize_nvfp4.register("triton", when=supported)
def quantize_nvfp4_triton(
    x: torch.Tensor,
    rounding: str = "nearest",
    per_row: bool = False,
    global_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    check_quantize(x, rounding, global_scale)
    if per_row and global_scale is None:
        return _launch(x, None, rounding, hadamard=1)
    x = rows_contiguous(x)
    amax = torch.empty((x.shape[0], 1), dtype=torch.float32, device=x.device)
    with on_device(x):
        row_amax_kernel[(triton.cdiv(x.shape[0], ROWS),)](
            x, amax, *x.shape, x.stride(0), BLOCK_M=ROWS, BLOCK_K=COLUMNS, enable_fp_fusion=False
        )
    if global_scale is None or global_scale.ndim == 0:
        amax = amax.amax()
    return _launch(x, global_scale_of(amax, global_scale), rounding, hadamard=1)


@hadamard_quantize_nvfp4.register("triton", when=supported)
def hadamard_quantize_nvfp4_triton(
    x: torch.Tensor, block: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    check_float("hadamard_quantize_nvfp4", x, ndim=2)
    check_nvfp4_columns("hadamard_quantize_nvfp4", x.shape[1])
    check_block("hadamard_quantize_nvfp4", x.shape[1], block)
    return _launch(x, None, "nearest", hadamard=max(block, 1))


def _launch(
    x: torch.Tensor, global_scale: torch.Tensor | None, rounding: str, hadamard: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize with the global scale given, or with one per row."""
    x = rows_contiguous(x)
    M, K = x.shape
    data = torch.empty((M, K // 2), dtype=torch.uint8, device=x.device)
    scale = torch.empty((M, K // 16), dtype=torch.uint8, device=x.device)
    given = global_scale is not None
    if not given:
        global_scale = torch.empty((M, 1), dtype=torch.float32, device=x.device)
    block_m = ROWS if rounding == "nearest" else CHOOSING_ROWS
    with on_device(x):
        quantize_nvfp4_kernel[(triton.cdiv(M, block_m),)](
            x,
            data,
            scale,
            global_scale,
            M,
            K,
            x.stride(0),
            0 if global_scale.ndim == 0 else 1,
            SCALE_RANGE=SCALE_RANGE,
            GIVEN_GLOBAL=given,
            ROUNDING=ROUNDINGS.index(rounding),
            HADAMARD=hadamard,
            FACTOR=hadamard**-0.5,
            PRODUCT=product_dtype(x),
            BLOCK_M=block_m,
            BLOCK_K=max(hadamard, 16) if hadamard > 1 else COLUMNS,
            enable_fp_fusion=False,
        )
    return data, scale.view(torch.float8_e4m3fn), global_scale
