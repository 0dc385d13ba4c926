"""Triton twin of NVFP4 decoding, which can rotate what it decodes back while it is in registers."""

import torch
import triton
import triton.language as tl

from .checks import check_nvfp4
from .formats_triton import decode_e2m1, decode_e4m3, rotate
from .nvfp4 import dequantize_nvfp4
from .support_triton import on_device, supported

TILE = (4, 512)  # rows and bytes that a program decodes


@triton.jit
def dequantize_nvfp4_kernel(
    data_ptr,
    scale_ptr,
    global_ptr,
    out_ptr,
    N,
    K,
    global_stride,
    WITH_GLOBAL: tl.constexpr,
    HADAMARD: tl.constexpr,
    FACTOR: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
):
    # grid: (ceil(N / BLOCK_N), ceil(K / 2 / BLOCK_BYTES))
    rows = (tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    byte = tl.program_id(1) * BLOCK_BYTES + tl.arange(0, BLOCK_BYTES)[None, :]
    mask = (rows < N) & (byte < K // 2)
    data = tl.load(data_ptr + rows * (K // 2) + byte, mask=mask, other=0).to(tl.int32)
    total = decode_e4m3(tl.load(scale_ptr + rows * (K // 16) + byte // 8, mask=mask, other=0).to(tl.int32))
    if WITH_GLOBAL:
        total = total * tl.load(global_ptr + rows * global_stride, mask=rows < N, other=0.0)
    values = tl.join(decode_e2m1(data >> 4) * total, decode_e2m1(data & 15) * total)
    values = rotate(tl.reshape(values, (BLOCK_N, BLOCK_BYTES * 2)), None, HADAMARD, FACTOR)
    k = tl.program_id(1) * BLOCK_BYTES * 2 + tl.arange(0, BLOCK_BYTES * 2)[None, :]
    tl.store(out_ptr + rows * K + k, values.to(out_ptr.dtype.element_ty), mask=(rows < N) & (k < K))


@dequantize_nvfp4.register("triton", when=supported)
def dequantize_nvfp4_triton(
    data: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    check_nvfp4("dequantize_nvfp4", data, scale, global_scale)
    return decode(data, scale, global_scale, dtype)


def decode(
    data: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor | None,
    dtype: torch.dtype,
    hadamard: int = 0,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Launch the decoder, and rotate in blocks of `hadamard` before rounding to `dtype`.

    Without `global_scale` and rotation: e2m1 * scale alone, exact in every dtype. With `device`, `data` and
    `scale` may lie in pinned host memory, where the kernel reads them.
    """
    N, K = data.shape[0], data.shape[1] * 2
    data = data.contiguous()
    scale = scale.contiguous().view(torch.uint8)
    out = torch.empty((N, K), dtype=dtype, device=device or data.device)
    rows, width = TILE
    block = max(hadamard, 1)
    with on_device(out):
        dequantize_nvfp4_kernel[(triton.cdiv(N, rows), triton.cdiv(K // 2, width))](
            data,
            scale,
            scale if global_scale is None else global_scale.contiguous(),
            out,
            N,
            K,
            0 if global_scale is None or global_scale.ndim == 0 else 1,
            WITH_GLOBAL=global_scale is not None,
            HADAMARD=block,
            FACTOR=block**-0.5,
            BLOCK_N=rows,
            BLOCK_BYTES=width,
            enable_fp_fusion=False,
        )
    return out
