"""Triton twins of what a run observes: partial sums per chunk, then their sum, in a fixed order.

No atomics, and chunks of a size that does not depend on the GPU: the same input gives the same bits.
"""

import torch
import triton
import triton.language as tl

from .checks import check_float
from .formats_triton import finite_abs
from .measures import block_measures, check_measures, magnitudes
from .support_triton import on_device, supported

BLOCK = 2048  # elements at a time; more spills registers
CHUNK = 65536  # elements of a program
FINAL_BLOCK = 1024  # partial sums at a time


@triton.jit
def block_measures_partial_kernel(
    inp_ptr,
    out_ptr,
    previous_ptr,
    partial_ptr,
    count,
    inp_stride,
    out_stride,
    previous_stride,
    WITH_PREVIOUS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # grid: (chunks, B). partial: (B, chunks, 4) sums |delta|, |inp|, (delta - previous)^2, previous^2
    item = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0).to(tl.int64) * CHUNK
    moved = tl.zeros((BLOCK,), tl.float32)
    size = tl.zeros((BLOCK,), tl.float32)
    change = tl.zeros((BLOCK,), tl.float32)
    before = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, CHUNK, BLOCK):
        i = first + start + tl.arange(0, BLOCK)
        mask = i < count
        inp = tl.load(inp_ptr + item * inp_stride + i, mask=mask, other=0.0).to(tl.float32)
        out = tl.load(out_ptr + item * out_stride + i, mask=mask, other=0.0).to(tl.float32)
        moved += tl.abs(out - inp)
        size += tl.abs(inp)
        if WITH_PREVIOUS:
            previous = tl.load(previous_ptr + item * previous_stride + i, mask=mask, other=0.0)
            previous = previous.to(tl.float32)
            difference = (out - inp) - previous
            change += difference * difference
            before += previous * previous
    at = partial_ptr + (item * tl.num_programs(0) + tl.program_id(0)) * 4
    tl.store(at, tl.sum(moved))
    tl.store(at + 1, tl.sum(size))
    tl.store(at + 2, tl.sum(change))
    tl.store(at + 3, tl.sum(before))


@triton.jit
def block_measures_final_kernel(
    partial_ptr, result_ptr, chunks, WITH_PREVIOUS: tl.constexpr, BLOCK: tl.constexpr
):
    # grid: (B,)
    item = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, 4)[None, :]
    sums = tl.zeros((BLOCK, 4), tl.float32)
    for start in range(0, chunks, BLOCK):
        i = start + tl.arange(0, BLOCK)[:, None]
        sums += tl.load(partial_ptr + (item * chunks + i) * 4 + columns, mask=i < chunks, other=0.0)
    total = tl.sum(sums, axis=0)
    lane = tl.arange(0, 4)
    moved = tl.sum(tl.where(lane == 0, total, 0.0))
    size = tl.sum(tl.where(lane == 1, total, 0.0))
    tl.store(result_ptr + item * 2, moved / size)
    change = float("nan")
    if WITH_PREVIOUS:
        difference = tl.sum(tl.where(lane == 2, total, 0.0))
        before = tl.sum(tl.where(lane == 3, total, 0.0))
        change = tl.sqrt(difference) / tl.sqrt(before)
    tl.store(result_ptr + item * 2 + 1, change)


@triton.jit
def magnitudes_partial_kernel(x_ptr, partial_ptr, count, x_stride, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    # grid: (chunks, B). partial: (B, chunks, 2) maxima and sums of |x|
    item = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0).to(tl.int64) * CHUNK
    largest = tl.zeros((BLOCK,), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, CHUNK, BLOCK):
        i = first + start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + item * x_stride + i, mask=i < count, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, finite_abs(x))
        total += tl.abs(x)
    at = partial_ptr + (item * tl.num_programs(0) + tl.program_id(0)) * 2
    tl.store(at, tl.max(largest))
    tl.store(at + 1, tl.sum(total))


@triton.jit
def magnitudes_final_kernel(partial_ptr, result_ptr, chunks, count, BLOCK: tl.constexpr):
    # grid: (B,)
    item = tl.program_id(0).to(tl.int64)
    largest = tl.zeros((BLOCK,), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, chunks, BLOCK):
        i = start + tl.arange(0, BLOCK)
        at = partial_ptr + (item * chunks + i) * 2
        largest = tl.maximum(largest, tl.load(at, mask=i < chunks, other=0.0))
        total += tl.load(at + 1, mask=i < chunks, other=0.0)
    mean = tl.sum(total) / count
    tl.store(result_ptr + item * 2, tl.max(largest))
    tl.store(result_ptr + item * 2 + 1, mean)


def _flat(x: torch.Tensor) -> torch.Tensor:
    """`x` (B, N, D), copied unless each item is contiguous, as a slice of the tokens is."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


@block_measures.register("triton", when=supported)
def block_measures_triton(
    inp: torch.Tensor, out: torch.Tensor, previous_delta: torch.Tensor | None = None
) -> torch.Tensor:
    check_measures(inp, out, previous_delta)
    inp, out = _flat(inp), _flat(out)
    previous = inp if previous_delta is None else _flat(previous_delta)
    batch, count = inp.shape[0], inp.shape[1] * inp.shape[2]
    chunks = triton.cdiv(count, CHUNK)
    partial = torch.empty((batch, chunks, 4), dtype=torch.float32, device=inp.device)
    result = torch.empty((batch, 2), dtype=torch.float32, device=inp.device)
    known = previous_delta is not None
    with on_device(inp):
        block_measures_partial_kernel[(chunks, batch)](
            inp,
            out,
            previous,
            partial,
            count,
            inp.stride(0),
            out.stride(0),
            previous.stride(0),
            WITH_PREVIOUS=known,
            CHUNK=CHUNK,
            BLOCK=BLOCK,
            enable_fp_fusion=False,
        )
        block_measures_final_kernel[(batch,)](
            partial, result, chunks, WITH_PREVIOUS=known, BLOCK=FINAL_BLOCK, enable_fp_fusion=False
        )
    return result


@magnitudes.register("triton", when=supported)
def magnitudes_triton(x: torch.Tensor) -> torch.Tensor:
    check_float("magnitudes", x, ndim=3)
    x = _flat(x)
    batch, count = x.shape[0], x.shape[1] * x.shape[2]
    chunks = triton.cdiv(count, CHUNK)
    partial = torch.empty((batch, chunks, 2), dtype=torch.float32, device=x.device)
    with on_device(x):
        magnitudes_partial_kernel[(chunks, batch)](
            x, partial, count, x.stride(0), CHUNK=CHUNK, BLOCK=BLOCK, enable_fp_fusion=False
        )
    return finish_magnitudes(partial, count)


def finish_magnitudes(partial: torch.Tensor, count: int) -> torch.Tensor:
    """(B, 2) `magnitudes` from (B, chunks, 2) maxima and sums of those of `count` values each."""
    batch, chunks, _ = partial.shape
    result = torch.empty((batch, 2), dtype=torch.float32, device=partial.device)
    with on_device(partial):
        magnitudes_final_kernel[(batch,)](
            partial, result, chunks, count, BLOCK=FINAL_BLOCK, enable_fp_fusion=False
        )
    return result
