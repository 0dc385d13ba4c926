"""Triton twin of the cast of an NVFP4 weight to INT8: one program takes a few output channels, twice."""

import torch
import triton
import triton.language as tl

from .cast import cast_nvfp4_to_int8, check_cast
from .formats_triton import (
    decode_e2m1,
    decode_e4m3,
    finite_abs,
    int8_of_product,
    int8_scales,
)
from .support_triton import on_device, supported

ROWS, BYTES, WARPS = 1, 512, 2  # of a program; measured on an H200


@triton.jit
def _load(data_ptr, scale_ptr, rows, first, global_scale, N, K, BLOCK_BYTES: tl.constexpr):
    """(bytes as int32, (BLOCK_N, blocks, 8); their scale times the global one, (BLOCK_N, blocks)), from byte
    `first` of the rows on; zeros beyond the edges."""
    block = first // 8 + tl.arange(0, BLOCK_BYTES // 8)
    inside = (rows < N) & (block < K // 16)[None, :]
    byte = block[:, None] * 8 + tl.arange(0, 8)[None, :]
    data = tl.load(data_ptr + rows[:, :, None] * (K // 2) + byte[None], mask=inside[:, :, None], other=0)
    code = tl.load(scale_ptr + rows * (K // 16) + block[None, :], mask=inside, other=0).to(tl.int32)
    return data.to(tl.int32), decode_e4m3(code) * global_scale


@triton.jit
def cast_nvfp4_to_int8_kernel(
    data_ptr,
    scale_ptr,
    global_ptr,
    q_ptr,
    channel_ptr,
    N,
    K,
    global_stride,
    BLOCK_N: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
):
    # grid: (ceil(N / BLOCK_N),)
    channels = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = channels[:, None]
    global_scale = tl.load(global_ptr + rows * global_stride, mask=rows < N, other=0.0)

    amax = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, K // 2, BLOCK_BYTES):
        data, total = _load(data_ptr, scale_ptr, rows, start, global_scale, N, K, BLOCK_BYTES)
        largest = tl.max(tl.maximum(data & 7, (data >> 4) & 7), axis=2)  # codes ascend as their values do
        amax = tl.maximum(amax, tl.max(finite_abs(decode_e2m1(largest) * total), axis=1))
    scale, inverse = int8_scales(amax, 1.0)
    tl.store(channel_ptr + channels, scale, mask=channels < N)

    finite = (scale == scale)[:, None]
    inverse = tl.broadcast_to(inverse[:, None], (BLOCK_N, 2 * BLOCK_BYTES))
    for start in range(0, K // 2, BLOCK_BYTES):
        data, total = _load(data_ptr, scale_ptr, rows, start, global_scale, N, K, BLOCK_BYTES)
        total = tl.broadcast_to(total[:, :, None], (BLOCK_N, BLOCK_BYTES // 8, 8))
        pairs = tl.join(decode_e2m1(data >> 4) * total, decode_e2m1(data & 15) * total)
        values = tl.reshape(pairs, (BLOCK_N, 2 * BLOCK_BYTES))
        q = tl.where(finite, int8_of_product(values, inverse), 0)
        k = start * 2 + tl.arange(0, 2 * BLOCK_BYTES)[None, :]
        tl.store(q_ptr + rows * K + k, q, mask=(rows < N) & (k < K))


@cast_nvfp4_to_int8.register("triton", when=supported)
def cast_nvfp4_to_int8_triton(
    data: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    check_cast(data, scale, global_scale, out)
    N, K = data.shape[0], data.shape[1] * 2
    q = torch.empty((N, K), dtype=torch.int8, device=data.device) if out is None else out
    channel_scale = torch.empty((N, 1), dtype=torch.float32, device=data.device)
    with on_device(data):
        cast_nvfp4_to_int8_kernel[(triton.cdiv(N, ROWS),)](
            data.contiguous(),
            scale.contiguous().view(torch.uint8),
            global_scale.contiguous(),
            q,
            channel_scale,
            N,
            K,
            0 if global_scale.ndim == 0 else 1,
            BLOCK_N=ROWS,
            BLOCK_BYTES=BYTES,
            num_warps=WARPS,
            enable_fp_fusion=False,
        )
    return q, channel_scale
