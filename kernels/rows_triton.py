"""Triton kernel over whole rows: what is done to them first, a Hadamard rotation, INT8. And the plain twins.

A program keeps whole rows in registers, so that each is read once, and walks over many tiles while the next
ones are on their way. A tile is a number of rows cut into chunks of 128 columns: two rows of 32 chunks, say.
Its rotation is one product with the 128 x 128 sign matrix, for any K. Where that leaves a quarter of a tile
empty, since its sizes are powers of two, it is three parts of a third of the columns each.

Divisions and conversions are what such a pass must not do per value: values are multiplied by 127 / amax and
rounded by an addition (`formats_triton.int8_of_product`), and the factor of the rotation goes into the scale.
Offsets inside a tile are int32: as int64 they take registers and time.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from .checks import check_block, check_float
from .formats_triton import (
    hadamard_signs,
    int8_of_product,
    int8_scales,
    largest_magnitude,
    rotate_sums,
)
from .gemm_triton import capability_of
from .hadamard import hadamard_quantize_int8
from .int8 import quantize_int8
from .row_tiles import COLUMNS, PLAIN, RowTile, row_tiles
from .support_triton import on_device, product_dtype, rows_contiguous, supported
from .tuner import fastest

LARGEST_STRIDE = 1 << 23  # offsets inside a tile are int32


@triton.jit
def _row_sums(x, ROWS: tl.constexpr):
    """Sums over each row of a tile (chunks * ROWS, columns): (ROWS,).

    First over columns, then over chunks. As one reduction over a reshaped tile it is slow, and on sm_90
    Triton 3.6 gets it wrong.
    """
    sums = tl.sum(x, 1)
    return tl.sum(tl.reshape(sums, (sums.shape[0] // ROWS, ROWS)), 0)


@triton.jit
def _row_largest(x, ROWS: tl.constexpr, INTERPRETED: tl.constexpr):
    """The largest |x| of each row, likewise; NaN or infinity if one is not finite."""
    largest = largest_magnitude(x, 1, INTERPRETED)
    return largest_magnitude(tl.reshape(largest, (largest.shape[0] // ROWS, ROWS)), 0, INTERPRETED)


@triton.jit
def _larger(a, b):
    """The larger magnitude of each place, NaN if one is."""
    return tl.maximum(tl.abs(a), tl.abs(b), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _by_chunk(x, SHAPE: tl.constexpr):
    """A number a row, (rows,), as SHAPE (chunks * rows, columns)."""
    chunks = tl.broadcast_to(x[None, :], (SHAPE[0] // x.shape[0], x.shape[0]))
    return tl.broadcast_to(tl.reshape(chunks, (SHAPE[0],))[:, None], SHAPE)


@triton.jit
def _once(x, INTERPRETED: tl.constexpr):
    """Float32 `x` in registers: not computed a second time for a second use."""
    if INTERPRETED:
        return x
    else:
        return tl.inline_asm_elementwise(
            "mov.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=False, pack=1
        )


@triton.jit
def _magnitudes(x, used, INTERPRETED: tl.constexpr):
    """The largest and the sum of |x| over chunks that are `used` (GROUP, 1), modulo GROUP.

    First over those that a thread holds by itself: GROUP is as many as all threads hold at a time.
    """
    groups = tl.reshape(tl.abs(x), (x.shape[0] // used.shape[0], used.shape[0], x.shape[1]))
    largest = tl.where(used, largest_magnitude(groups, 0, INTERPRETED), 0.0)
    total = tl.where(used, tl.sum(groups, 0), 0.0)
    largest = largest_magnitude(tl.reshape(largest, (used.shape[0] * x.shape[1],)), 0, INTERPRETED)
    return largest, tl.sum(total)


@triton.jit
def _gelu(x, DOUBLED: tl.constexpr, APPROXIMATE: tl.constexpr):
    """GELU by tanh, in float32. DOUBLED: twice that, which saves a multiplication."""
    f = x.to(tl.float32)
    u = f * tl.fma(f * f, 0.7978845608028654 * 0.044715, 0.7978845608028654)
    if APPROXIMATE:
        t = tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [u], dtype=tl.float32, is_pure=True, pack=1
        )
        h = f if DOUBLED else 0.5 * f
        y = tl.fma(h, t, h)
    else:
        y = f / (1.0 + tl.exp(-2.0 * u))
    return y


@triton.jit
def _place(tile, T, V, ROWS: tl.constexpr):
    """(batch item, whether its text, tokens of that stream, first token) of a tile."""
    text_tiles = tl.cdiv(T, ROWS)
    item_tiles = text_tiles + tl.cdiv(V, ROWS)
    is_text = tile % item_tiles < text_tiles
    first = (tile % item_tiles - tl.where(is_text, 0, text_tiles)) * ROWS
    return tile // item_tiles, is_text, tl.where(is_text, T, V), first


@triton.jit
def _load(
    text_ptr,
    video_ptr,
    tile,
    tiles,
    T,
    V,
    row_stride,
    row,
    column,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    EVEN: tl.constexpr,
):
    """A part of the rows of a tile, zeros beyond its stream and beyond the last tile."""
    item, is_text, size, first = _place(tile, T, V, ROWS)
    source = text_ptr if is_text else video_ptr
    source += (item * size + first).to(tl.int64) * row_stride
    mask = (first + row < tl.where(tile < tiles, size, 0))[:, None]
    if not EVEN:
        mask = mask & (column < K)
    return tl.load(source + (row[:, None] * row_stride + column), mask=mask, other=0.0)


@triton.jit(do_not_specialize=["B", "T", "V"])
def rows_kernel(
    text_ptr,
    video_ptr,
    coefficients_ptr,
    y_ptr,
    scale_ptr,
    partial_ptr,
    B,
    T,
    V,
    row_stride,
    eps,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    PROLOGUE: tl.constexpr,
    QUANTIZE: tl.constexpr,
    OUTLIERS: tl.constexpr,
    HADAMARD: tl.constexpr,
    FACTOR: tl.constexpr,
    PRODUCT: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    # grid: any number of programs. Tiles hold rows of one stream of one batch item. partial: (tiles, 2) of
    # the largest and the sum of |x|; coefficients: (B, 2, 2, WIDTH) of factor and shift, the video's first.
    # GROUP: of chunks that all threads hold at a time; a thread reduces what it holds by itself.
    tl.static_assert(PARTS == 1 or (PROLOGUE < 2 and not AHEAD))
    DTYPE: tl.constexpr = video_ptr.dtype.element_ty
    APPROXIMATE: tl.constexpr = PROLOGUE == 1 and not INTERPRETED and tl.float32 != DTYPE
    DOUBLED: tl.constexpr = APPROXIMATE and tl.bfloat16 == DTYPE  # twice a float16 might overflow
    TOTAL_FACTOR: tl.constexpr = FACTOR * 0.5 if DOUBLED else FACTOR
    WIDTH: tl.constexpr = CHUNKS * COLUMNS
    EVEN: tl.constexpr = PARTS * WIDTH == K
    signs = hadamard_signs(HADAMARD, COLUMNS, PRODUCT)
    chunk = tl.arange(0, ROWS * CHUNKS)
    row = chunk % ROWS  # so that a thread, which holds every so many chunks, holds those of few rows
    column = (chunk // ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    lane = tl.arange(0, ROWS)
    offset = row[:, None] * K + column
    tiles = B * (tl.cdiv(T, ROWS) + tl.cdiv(V, ROWS))
    step = tl.num_programs(0)
    if AHEAD:
        ahead = _load(
            text_ptr, video_ptr, tl.program_id(0), tiles, T, V, row_stride, row, column, ROWS, K, EVEN
        )
    for tile in tl.range(tl.program_id(0), tiles, step, num_stages=STAGES):
        item, is_text, size, first = _place(tile, T, V, ROWS)
        target = (item * (T + V) + tl.where(is_text, 0, T) + first).to(tl.int64)
        mask = (first + row < size)[:, None]
        sums = ()
        for part in tl.static_range(PARTS):
            at = column + part * WIDTH
            if AHEAD:
                x = ahead
                ahead = _load(
                    text_ptr, video_ptr, tile + step, tiles, T, V, row_stride, row, at, ROWS, K, EVEN
                )
            else:
                x = _load(text_ptr, video_ptr, tile, tiles, T, V, row_stride, row, at, ROWS, K, EVEN)

            if PROLOGUE == 1:
                y = _gelu(x, DOUBLED, APPROXIMATE)
            if PROLOGUE == 2:
                stream = coefficients_ptr + (item * 2 + tl.where(is_text, 1, 0)).to(tl.int64) * 2 * WIDTH
                factor = tl.load(stream + column).to(tl.float32)
                shift = tl.load(stream + WIDTH + column).to(tl.float32)
                f = x.to(tl.float32)
                f = tl.where(column < K, f - _by_chunk(_row_sums(f, ROWS) / K, x.shape), 0.0)
                deviation = tl.rsqrt(_row_sums(f * f, ROWS) / K + eps)
                y = tl.fma(f * _by_chunk(deviation, x.shape), factor, shift)
            if PROLOGUE > 0:
                if OUTLIERS or PARTS > 1:
                    y = _once(y, INTERPRETED)
                x = y.to(x.dtype)
            if OUTLIERS:
                found = _magnitudes(y, (first + tl.arange(0, GROUP) % ROWS < size)[:, None], INTERPRETED)
                if part == 0:
                    largest, total = found
                else:
                    largest, total = _larger(largest, found[0]), total + found[1]

            written = mask if EVEN else mask & (at < K)
            if QUANTIZE:
                sums += (rotate_sums(x, signs, HADAMARD),)
            else:
                tl.store(y_ptr + target * K + offset + part * WIDTH, x, mask=written)

        if OUTLIERS:
            if DOUBLED:
                largest, total = 0.5 * largest, 0.5 * total
            tl.store(partial_ptr + tile * 2, largest.to(DTYPE).to(tl.float32))  # as of the rounded numbers
            tl.store(partial_ptr + tile * 2 + 1, total)
        if QUANTIZE:
            furthest = sums[0]
            for part in tl.static_range(1, PARTS):
                furthest = _larger(furthest, sums[part])
            scale, inverse = int8_scales(_row_largest(furthest, ROWS, INTERPRETED), TOTAL_FACTOR)
            tl.store(scale_ptr + target + lane, scale, mask=first + lane < size)
            for part in tl.static_range(PARTS):
                q = int8_of_product(sums[part], _by_chunk(inverse, sums[part].shape))
                written = mask if EVEN else mask & (column + part * WIDTH < K)
                tl.store(y_ptr + target * K + offset + part * WIDTH, q, mask=written)


@quantize_int8.register("triton", when=supported)
def quantize_int8_triton(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    check_float("quantize_int8", x, ndim=2)
    return _quantize(x, block=1)


@hadamard_quantize_int8.register("triton", when=supported)
def hadamard_quantize_int8_triton(x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    check_float("hadamard_quantize_int8", x, ndim=2)
    check_block("hadamard_quantize_int8", x.shape[1], block)
    return _quantize(x, block)


def _quantize(x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = rows_contiguous(x)
    x = x if x.stride(0) < LARGEST_STRIDE else x.contiguous()
    q = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scale = torch.empty((x.shape[0], 1), dtype=torch.float32, device=x.device)
    if x.numel():
        launch_rows(x[None, :0], x[None], q, scale=scale, block=block, row_stride=x.stride(0))
    return q, scale


def launch_rows(
    text: torch.Tensor,
    video: torch.Tensor,
    y: torch.Tensor,
    prologue: int = PLAIN,
    coefficients: torch.Tensor | None = None,
    eps: float = 0.0,
    scale: torch.Tensor | None = None,
    block: int = 1,
    outliers: bool = False,
    row_stride: int | None = None,
) -> torch.Tensor | None:
    """Run the kernel over `text` (B, T, K) and `video` (B, V, K), contiguous or with rows that far apart.

    `y` is (B * (T + V), K): int8 if `scale` is given, else of the type of `video`. With `outliers` returns
    (B, tiles of an item, 2): the largest and the sum of |x| of each tile, before the rotation.
    """
    batch, tokens, width = video.shape
    tiles = row_tiles(width, video.dtype, prologue, capability_of(video), block, outliers)
    rows = tiles[0].rows
    item_tiles = triton.cdiv(text.shape[1], rows) + triton.cdiv(tokens, rows)
    partial = torch.empty((batch, item_tiles, 2), device=video.device) if outliers else None
    block = max(block, 1)

    def launch(tile: RowTile) -> None:
        programs = min(batch * item_tiles, multiprocessors(video) * tile.programs)
        with on_device(video):
            rows_kernel[(programs,)](
                text if text.shape[1] else video,
                video,
                video if coefficients is None else coefficients,
                y,
                y if scale is None else scale,
                y if partial is None else partial,
                batch,
                text.shape[1],
                tokens,
                width if row_stride is None else row_stride,
                eps,
                K=width,
                ROWS=tile.rows,
                PARTS=tile.parts,
                CHUNKS=tile.chunks,
                COLUMNS=COLUMNS,
                GROUP=tile.group,
                PROLOGUE=prologue,
                QUANTIZE=scale is not None,
                OUTLIERS=outliers,
                HADAMARD=block,
                FACTOR=block**-0.5,
                PRODUCT=product_dtype(video),
                STAGES=tile.stages,
                AHEAD=tile.ahead,
                INTERPRETED=not video.is_cuda,
                num_warps=tile.warps,
                enable_fp_fusion=True,  # only sums of squares have anything to fuse
            )

    name = f"rows {prologue} {str(video.dtype).removeprefix('torch.')}" + " int8" * (scale is not None)
    launch(fastest(name, (batch * (text.shape[1] + tokens), width), tiles, launch, video))
    return partial


def multiprocessors(x: torch.Tensor) -> int:
    """Of the device of `x`; 1 on the CPU, where programs run one after the other."""
    return _multiprocessors(x.device.index) if x.is_cuda else 1


@cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
