"""Triton twins of what a block does between its products: the passes over whole rows, and the gated residual.

LayerNorm's weight and bias and the modulation are first made into one factor and one shift per stream and
column, so that the pass over the tokens loads two numbers instead of four.
"""

import torch
import triton
import triton.language as tl

from .checks import check_block
from .fused import (
    Quantized,
    check_gate_residual,
    check_gelu,
    check_norm_modulate,
    gate_residual,
    gelu_int8,
    norm_modulate,
    norm_modulate_int8,
)
from .measures_triton import finish_magnitudes
from .row_tiles import GELU, NORM, padded_width
from .rows_triton import launch_rows
from .support_triton import on_device, supported

COEFFICIENTS = 1024  # columns of a program
GATE_TILE = (4, 1024)  # rows and columns of a program


@triton.jit
def coefficients_kernel(
    weight_ptr,
    bias_ptr,
    scale_ptr,
    shift_ptr,
    out_ptr,
    D,
    padded,
    scale_item,
    scale_stream,
    shift_item,
    shift_stream,
    WITH_WEIGHT: tl.constexpr,
    WITH_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # grid: (ceil(padded / BLOCK), 2 B). out: (B, 2, 2, padded) of factor and shift, zero from D on
    item, stream = tl.program_id(1) // 2, tl.program_id(1) % 2
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = column < D
    scale_at = scale_ptr + item * scale_item + stream * scale_stream + column
    shift_at = shift_ptr + item * shift_item + stream * shift_stream + column
    factor = 1.0 + tl.load(scale_at, mask=mask, other=-1.0).to(tl.float32)
    shift = tl.load(shift_at, mask=mask, other=0.0).to(tl.float32)
    if WITH_BIAS:
        shift += tl.load(bias_ptr + column, mask=mask, other=0.0).to(tl.float32) * factor
    if WITH_WEIGHT:
        factor *= tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    out = out_ptr + tl.program_id(1) * 2 * padded + column
    tl.store(out, factor.to(out_ptr.dtype.element_ty), mask=column < padded)
    tl.store(out + padded, shift.to(out_ptr.dtype.element_ty), mask=column < padded)


@triton.jit(do_not_specialize=["T", "V"])
def gate_residual_kernel(
    text_ptr,
    video_ptr,
    y_ptr,
    gate_ptr,
    new_text_ptr,
    new_video_ptr,
    T,
    V,
    D,
    gate_item,
    gate_stream,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # grid: (ceil(T / BLOCK_M) + ceil(V / BLOCK_M), ceil(D / BLOCK_D), B)
    tile, item = tl.program_id(0), tl.program_id(2)
    text_tiles = tl.cdiv(T, BLOCK_M)
    is_text = tile < text_tiles
    size = tl.where(is_text, T, V)
    row = (tile - tl.where(is_text, 0, text_tiles)) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = (row < size)[:, None] & (column < D)[None, :]
    old = text_ptr if is_text else video_ptr
    new = new_text_ptr if is_text else new_video_ptr
    at = (item * size + row).to(tl.int64)[:, None] * D + column[None, :]
    y_at = (item * (T + V) + tl.where(is_text, 0, T) + row).to(tl.int64)[:, None] * D + column[None, :]
    gate_at = gate_ptr + item * gate_item + tl.where(is_text, 1, 0) * gate_stream + column
    gate = tl.load(gate_at, mask=column < D, other=0.0).to(tl.float32)
    x = tl.load(old + at, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + y_at, mask=mask, other=0.0).to(tl.float32)
    x = tl.fma(y, tl.broadcast_to(gate[None, :], x.shape), x)
    tl.store(new + at, x.to(video_ptr.dtype.element_ty), mask=mask)


@norm_modulate.register("triton", when=supported)
def norm_modulate_triton(
    text: torch.Tensor,
    video: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    scale: torch.Tensor,
    shift: torch.Tensor,
) -> torch.Tensor:
    check_norm_modulate("norm_modulate", text, video, weight, bias, scale, shift)
    batch, tokens, width = video.shape
    y = torch.empty((batch, text.shape[1] + tokens, width), dtype=video.dtype, device=video.device)
    coefficients = _coefficients(weight, bias, scale, shift, video.dtype)
    launch_rows(text.contiguous(), video.contiguous(), y, NORM, coefficients, eps)
    return y


@norm_modulate_int8.register("triton", when=supported)
def norm_modulate_int8_triton(
    text: torch.Tensor,
    video: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    scale: torch.Tensor,
    shift: torch.Tensor,
    block: int,
    outliers: bool = False,
) -> Quantized:
    check_norm_modulate("norm_modulate_int8", text, video, weight, bias, scale, shift)
    check_block("norm_modulate_int8", video.shape[2], block)
    coefficients = _coefficients(weight, bias, scale, shift, video.dtype)
    return _quantize(text.contiguous(), video.contiguous(), NORM, coefficients, eps, block, outliers)


@gelu_int8.register("triton", when=supported)
def gelu_int8_triton(
    x: torch.Tensor,
    block: int,
    outliers: bool = False,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Quantized:
    check_gelu(x, block, out)
    x = x.contiguous()
    return _quantize(x[:, :0], x, GELU, None, 0.0, block, outliers, out)


def _quantize(
    text: torch.Tensor,
    video: torch.Tensor,
    prologue: int,
    coefficients: torch.Tensor | None,
    eps: float,
    block: int,
    outliers: bool,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Quantized:
    batch, tokens, width = video.shape
    rows = batch * (text.shape[1] + tokens)
    q, row_scale = out or (
        torch.empty((rows, width), dtype=torch.int8, device=video.device),
        torch.empty((rows, 1), dtype=torch.float32, device=video.device),
    )
    partial = launch_rows(text, video, q, prologue, coefficients, eps, row_scale, block, outliers)
    if not outliers:
        return q, row_scale
    return q, row_scale, finish_magnitudes(partial, rows // batch * width)


def _coefficients(
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: torch.Tensor,
    shift: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """(B, 2, 2, D padded) of `dtype`: what a normalized value is multiplied by, and what is added."""
    batch, _, width = scale.shape
    padded = padded_width(width)
    scale, shift = _unit_stride(scale), _unit_stride(shift)
    out = torch.empty((batch, 2, 2, padded), dtype=dtype, device=scale.device)
    with on_device(scale):
        coefficients_kernel[(triton.cdiv(padded, COEFFICIENTS), 2 * batch)](
            scale if weight is None else weight.contiguous(),
            scale if bias is None else bias.contiguous(),
            scale,
            shift,
            out,
            width,
            padded,
            *scale.stride()[:2],
            *shift.stride()[:2],
            WITH_WEIGHT=weight is not None,
            WITH_BIAS=bias is not None,
            BLOCK=COEFFICIENTS,
            enable_fp_fusion=False,
        )
    return out


@gate_residual.register("triton", when=supported)
def gate_residual_triton(
    text: torch.Tensor,
    video: torch.Tensor,
    y: torch.Tensor,
    gate: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    check_gate_residual(text, video, y, gate, out)
    text, video, y, gate = text.contiguous(), video.contiguous(), y.contiguous(), _unit_stride(gate)
    batch, tokens, width = video.shape
    new_text, new_video = out or (torch.empty_like(text), torch.empty_like(video))
    rows, columns = GATE_TILE
    tiles = triton.cdiv(text.shape[1], rows) + triton.cdiv(tokens, rows)
    with on_device(video):
        gate_residual_kernel[(tiles, triton.cdiv(width, columns), batch)](
            text if text.numel() else video,
            video,
            y,
            gate,
            new_text if text.numel() else new_video,
            new_video,
            text.shape[1],
            tokens,
            width,
            *gate.stride()[:2],
            BLOCK_M=rows,
            BLOCK_D=columns,
            enable_fp_fusion=False,
        )
    return new_text, new_video


def _unit_stride(x: torch.Tensor) -> torch.Tensor:
    """`x`, copied unless its last axis is contiguous; the others may have any stride, as slices have."""
    return x if x.stride(-1) == 1 else x.contiguous()
