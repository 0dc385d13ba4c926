"""Products of quantized matrices:  y[m, n] = row_scale[m] * column_scale[n] * sum_k a[m, k] b[n, k] + bias[n]

`scaled_gemm` takes INT8 operands (summed as int32) or bfloat16 ones (summed as float32), both with K last,
as Hopper's INT8 WGMMA wants them; from compute capability 9.0 on INT8 ones come by tensor descriptors.
`fp4_gemm` takes NVFP4 operands and needs a GPU with FP4 units to be fast. The scales and the bias are applied
in float32 in the epilogue, and the result is rounded once.

In an NVFP4 byte our even element is in the high nibble, while the FP4 instructions read the low one first.
Both operands have it so: the products are the same ones, summed in another order, and nothing is swapped.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .support_triton import on_device
from .tuner import fastest


@dataclass(frozen=True)
class Tile:
    """How a product is cut up. `k_bytes` is the depth of a tile in bytes of one operand's row."""

    m: int
    n: int
    k_bytes: int
    warps: int
    stages: int
    group_m: int = 8  # tile rows that are walked together, so that they share columns of b in the L2 cache
    descriptors: bool = False  # operands and result go by tensor descriptors, where the GPU has them


# By compute capability, in which the minor number counts only below 9. Tiles of 128x256x128 bytes take 48 KiB
# a stage: three fit in the 227 KiB of Hopper, not in the 99 KiB of sm_86, 89 and 120. On sm_100 their
# epilogue spills registers.
GEMM_TILES = {
    (8, 0): Tile(128, 128, 128, warps=8, stages=3),
    (9, 0): Tile(128, 256, 128, warps=8, stages=3),
    (10, 0): Tile(128, 128, 128, warps=8, stages=3),
}
# For int8 operands. On Hopper two programs of 96 KiB run on a multiprocessor, and one multiplies while the
# other stores: docs/performance.md has the times of this and of other tiles. The others: not measured.
INT8_TILES = {
    (9, 0): Tile(128, 128, 128, warps=4, stages=3, group_m=24, descriptors=True),
    (10, 0): Tile(128, 128, 128, warps=8, stages=3, descriptors=True),
    (12, 0): Tile(128, 128, 64, warps=8, stages=4, descriptors=True),
}
SMALL_GEMM_TILE = Tile(128, 128, 64, warps=8, stages=4)
# What may be timed beside the table's tile of int8 operands, where that was not measured: int32 sums are the
# same in any order. `tests/kernels/test_compile.py` holds each to its GPU's shared memory and registers.
WIDE, TALL = Tile(128, 256, 64, warps=8, stages=4), Tile(256, 128, 64, warps=8, stages=4)
INT8_OTHERS = {
    (8, 0): (SMALL_GEMM_TILE, WIDE, TALL),
    (8, 6): (Tile(128, 128, 128, warps=8, stages=3), WIDE, TALL),
    (8, 9): (Tile(128, 128, 128, warps=8, stages=3), WIDE, TALL),
    (10, 0): (
        Tile(128, 128, 128, warps=8, stages=5, descriptors=True),
        Tile(128, 128, 64, warps=8, stages=6, descriptors=True),
        Tile(128, 128, 128, warps=8, stages=4, group_m=16, descriptors=True),
    ),
    (12, 0): (
        Tile(128, 128, 128, warps=8, stages=3, descriptors=True),
        WIDE,  # by pointers: a float32 tile of it on its way out by descriptor takes 128 KiB
        SMALL_GEMM_TILE,
    ),
}
FP4_TILES = {(10, 0): Tile(128, 128, 128, warps=8, stages=3)}
SMALL_FP4_TILE = Tile(128, 128, 64, warps=8, stages=3)


@triton.jit
def _tile_of(M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Tile coordinates of this program, in groups of GROUP_M tile rows."""
    pid = tl.program_id(0)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    group = pid // (GROUP_M * tiles_n)
    first = group * GROUP_M
    height = tl.minimum(tiles_m - first, GROUP_M)
    inside = pid % (GROUP_M * tiles_n)
    return first + inside % height, inside // height


@triton.jit
def _epilogue(
    acc, y_ptr, row_scale_ptr, column_scale_ptr, bias_ptr, rows, columns, M, N, column_stride, WITH_BIAS
):
    """Scale, add the bias, round, store."""
    y = _scaled(acc, row_scale_ptr, column_scale_ptr, bias_ptr, rows, columns, M, N, column_stride, WITH_BIAS)
    mask = (rows[:, None] < M) & (columns[None, :] < N)
    y_tile = y_ptr + rows[:, None] * N
    tl.store(y_tile + columns[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _scaled(
    acc,
    row_scale_ptr,
    column_scale_ptr,
    bias_ptr,
    rows,
    columns,
    M,
    N,
    column_stride,
    WITH_BIAS: tl.constexpr,
):
    """Float32 of a tile of sums, scaled, the bias added."""
    row_scale = tl.load(row_scale_ptr + rows, mask=rows < M, other=0.0)
    column_scale = tl.load(column_scale_ptr + columns * column_stride, mask=columns < N, other=0.0)
    y = acc.to(tl.float32) * row_scale[:, None] * column_scale[None, :]
    if WITH_BIAS:
        y += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    return y


@triton.jit
def scaled_gemm_kernel(
    a_ptr,
    b_ptr,
    y_ptr,
    row_scale_ptr,
    column_scale_ptr,
    bias_ptr,
    M,
    N,
    K,
    column_stride,
    WITH_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    # grid: (ceil(M / BLOCK_M) * ceil(N / BLOCK_N),)
    tile_m, tile_n = _tile_of(M, N, BLOCK_M, BLOCK_N, GROUP_M)
    rows = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    a_tile = a_ptr + rows[:, None] * K + depth[None, :]
    b_tile = b_ptr + columns[:, None].to(tl.int64) * K + depth[None, :]
    if a_ptr.dtype.element_ty == tl.int8:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        a_mask = rows[:, None] < M
        b_mask = columns[:, None] < N
        if not EVEN_K:
            a_mask = a_mask & (start + depth[None, :] < K)
            b_mask = b_mask & (start + depth[None, :] < K)
        a = tl.load(a_tile + start, mask=a_mask, other=0)
        b = tl.load(b_tile + start, mask=b_mask, other=0)
        acc = tl.dot(a, b.T, acc, out_dtype=acc.dtype)
    _epilogue(
        acc, y_ptr, row_scale_ptr, column_scale_ptr, bias_ptr, rows, columns, M, N, column_stride, WITH_BIAS
    )


@triton.jit
def described_gemm_kernel(
    a_desc,
    b_desc,
    y_desc,
    row_scale_ptr,
    column_scale_ptr,
    bias_ptr,
    M,
    N,
    K,
    column_stride,
    WITH_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    # grid: (ceil(M / BLOCK_M) * ceil(N / BLOCK_N),). Descriptors read zeros beyond the edges
    tile_m, tile_n = _tile_of(M, N, BLOCK_M, BLOCK_N, GROUP_M)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    for start in range(0, K, BLOCK_K):
        a = a_desc.load([tile_m * BLOCK_M, start])
        b = b_desc.load([tile_n * BLOCK_N, start])
        acc = tl.dot(a, b.T, acc, out_dtype=tl.int32)
    rows = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    y = _scaled(acc, row_scale_ptr, column_scale_ptr, bias_ptr, rows, columns, M, N, column_stride, WITH_BIAS)
    y_desc.store([tile_m * BLOCK_M, tile_n * BLOCK_N], y.to(y_desc.dtype))


@triton.jit
def fp4_gemm_kernel(
    a_ptr,
    b_ptr,
    a_scale_ptr,
    b_scale_ptr,
    y_ptr,
    row_scale_ptr,
    column_scale_ptr,
    bias_ptr,
    M,
    N,
    K,
    column_stride,
    WITH_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    # grid: (ceil(M / BLOCK_M) * ceil(N / BLOCK_N),)
    tile_m, tile_n = _tile_of(M, N, BLOCK_M, BLOCK_N, GROUP_M)
    rows = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    a_rows, b_rows = rows[:, None], columns[:, None].to(tl.int64)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        byte = start // 2 + tl.arange(0, BLOCK_K // 2)[None, :]
        block = start // 16 + tl.arange(0, BLOCK_K // 16)[None, :]
        a = tl.load(a_ptr + a_rows * (K // 2) + byte, mask=(a_rows < M) & (byte < K // 2), other=0)
        b = tl.load(b_ptr + b_rows * (K // 2) + byte, mask=(b_rows < N) & (byte < K // 2), other=0)
        a_mask = (a_rows < M) & (block < K // 16)
        b_mask = (b_rows < N) & (block < K // 16)
        a_scale = tl.load(a_scale_ptr + a_rows * (K // 16) + block, mask=a_mask, other=0)
        b_scale = tl.load(b_scale_ptr + b_rows * (K // 16) + block, mask=b_mask, other=0)
        a_scale = a_scale.to(tl.float8e4nv, bitcast=True)
        b_scale = b_scale.to(tl.float8e4nv, bitcast=True)
        acc = tl.dot_scaled(a, a_scale, "e2m1", b.T, b_scale, "e2m1", acc)
    _epilogue(
        acc, y_ptr, row_scale_ptr, column_scale_ptr, bias_ptr, rows, columns, M, N, column_stride, WITH_BIAS
    )


def gemm_tile(capability: tuple[int, int], dtype: torch.dtype) -> Tile:
    """The tile of `scaled_gemm` for a compute capability and the type of the operands."""
    key = _table_key(capability)
    tile = GEMM_TILES.get(key, SMALL_GEMM_TILE)
    return INT8_TILES.get(key, tile) if dtype == torch.int8 else tile


def int8_tiles(capability: tuple[int, int]) -> tuple[Tile, ...]:
    """Tiles that may be timed for int8 operands, the table's first; it alone where it was measured."""
    return (gemm_tile(capability, torch.int8), *INT8_OTHERS.get(_table_key(capability), ()))


def fp4_tile(capability: tuple[int, int]) -> Tile:
    """The tile of `fp4_gemm` for a compute capability."""
    return FP4_TILES.get(_table_key(capability), SMALL_FP4_TILE)


def _table_key(capability: tuple[int, int]) -> tuple[int, int]:
    return capability if capability[0] < 9 else (capability[0], 0)


def has_fp4(capability: tuple[int, int]) -> bool:
    """Whether GPUs of this compute capability multiply NVFP4 natively."""
    return capability[0] in (10, 12)


def capability_of(x: torch.Tensor) -> tuple[int, int]:
    """Compute capability of the device of `x`; (0, 0) on the CPU, where kernels are interpreted."""
    return torch.cuda.get_device_capability(x.device) if x.is_cuda else (0, 0)


def scaled_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    row_scale: torch.Tensor,
    column_scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Launch the product of `a` (M, K) and `b` (N, K), both int8 or both bfloat16, contiguous.

    Descriptors want rows that start at multiples of 16 bytes: every NVFP4 weight has them, and most results.
    Where one does not, the product is by pointers.

    `row_scale` is (M, 1) float32; `column_scale` is float32 () or (N, 1). Returns (M, N) of `dtype`.
    """
    (M, K), N = a.shape, b.shape[0]
    y = torch.empty((M, N), dtype=dtype, device=a.device)

    def launch(tile: Tile) -> None:
        _launch(tile, a, b, y, row_scale, column_scale, bias)

    if a.dtype == torch.int8:
        tile = fastest("int8 product", (M, N, K), int8_tiles(capability_of(a)), launch, a)
    else:  # sums of another order may be other sums
        tile = gemm_tile(capability_of(a), a.dtype)
    launch(tile)
    return y


def _launch(
    tile: Tile,
    a: torch.Tensor,
    b: torch.Tensor,
    y: torch.Tensor,
    row_scale: torch.Tensor,
    column_scale: torch.Tensor,
    bias: torch.Tensor | None,
) -> None:
    (M, K), N = a.shape, b.shape[0]
    block_k = tile.k_bytes // a.element_size()
    if tile.descriptors and K % 16 == 0 and N * y.element_size() % 16 == 0:
        operands = (
            TensorDescriptor.from_tensor(a, [tile.m, block_k]),
            TensorDescriptor.from_tensor(b, [tile.n, block_k]),
            TensorDescriptor.from_tensor(y, [tile.m, tile.n]),
        )
        kernel, options = described_gemm_kernel, {}
    else:
        operands = (a, b, y)
        kernel, options = scaled_gemm_kernel, {"EVEN_K": K % block_k == 0}
    with on_device(a):
        kernel[(triton.cdiv(M, tile.m) * triton.cdiv(N, tile.n),)](
            *operands,
            row_scale,
            column_scale,
            row_scale if bias is None else bias,
            M,
            N,
            K,
            0 if column_scale.ndim == 0 else 1,
            **options,
            WITH_BIAS=bias is not None,
            BLOCK_M=tile.m,
            BLOCK_N=tile.n,
            BLOCK_K=block_k,
            GROUP_M=tile.group_m,
            num_warps=tile.warps,
            num_stages=tile.stages,
            enable_fp_fusion=False,
        )


def fp4_gemm(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    row_scale: torch.Tensor,
    column_scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Launch the product of NVFP4 `a` (M, K/2 bytes) and `b` (N, K/2), with their block scales, contiguous.

    The global scales are `row_scale` (M, 1) and `column_scale` () or (N, 1). Returns (M, N) of `dtype`.
    """
    tile = fp4_tile(capability_of(a))
    M, N, K = a.shape[0], b.shape[0], a.shape[1] * 2
    y = torch.empty((M, N), dtype=dtype, device=a.device)
    with on_device(a):
        fp4_gemm_kernel[(triton.cdiv(M, tile.m) * triton.cdiv(N, tile.n),)](
            a,
            b,
            a_scale.view(torch.uint8),
            b_scale.view(torch.uint8),
            y,
            row_scale,
            column_scale,
            row_scale if bias is None else bias,
            M,
            N,
            K,
            0 if column_scale.ndim == 0 else 1,
            WITH_BIAS=bias is not None,
            BLOCK_M=tile.m,
            BLOCK_N=tile.n,
            BLOCK_K=tile.k_bytes * 2,
            GROUP_M=tile.group_m,
            num_warps=tile.warps,
            num_stages=tile.stages,
            enable_fp_fusion=False,
        )
    return y
