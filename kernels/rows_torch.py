"""Twins of the passes over rows in plain PyTorch, for a GPU without Triton: a few passes in 16 bits.

They round to 16 bits once or twice more than the references, which compute in float32 and move more bytes.
What is not here (`block_measures`, rotary positions) the references do.
"""

from __future__ import annotations

import torch

from .checks import check_block, check_float
from .decode_torch import in_pieces, quantize_rows_half, rotated_rows
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
from .hadamard import hadamard_quantize_int8
from .int8 import quantize_int8
from .linear_torch import has_half
from .measures import magnitudes

HALF = "half"


@quantize_int8.register(HALF, when=has_half)
def quantize_int8_half(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    check_float("quantize_int8", x, ndim=2)
    return quantize_rows_half(x, 1.0)


@hadamard_quantize_int8.register(HALF, when=has_half)
def hadamard_quantize_int8_half(x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    check_float("hadamard_quantize_int8", x, ndim=2)
    check_block("hadamard_quantize_int8", x.shape[1], block)
    return _quantize(x, block)


@magnitudes.register(HALF, when=has_half)
def magnitudes_half(x: torch.Tensor) -> torch.Tensor:
    check_float("magnitudes", x, ndim=3)
    rows = x.flatten(1)
    largest = torch.linalg.vector_norm(rows, torch.inf, dim=1).float()
    total = torch.linalg.vector_norm(rows, 1, dim=1, dtype=torch.float32)
    return torch.stack([largest, total / rows.shape[1]], dim=1)


@norm_modulate.register(HALF, when=has_half)
def norm_modulate_half(
    text: torch.Tensor,
    video: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    scale: torch.Tensor,
    shift: torch.Tensor,
) -> torch.Tensor:
    check_norm_modulate("norm_modulate", text, video, weight, bias, scale, shift)
    factor = 1 + scale.float()
    offset = shift.float() if bias is None else shift.float() + bias.float() * factor
    factor = factor if weight is None else factor * weight.float()
    factor, offset = factor.to(video.dtype), offset.to(video.dtype)
    words, width = text.shape[1], video.shape[2]
    joined = video.new_empty((video.shape[0], words + video.shape[1], width))
    for row, part, place in ((1, text, joined[:, :words]), (0, video, joined[:, words:])):
        normal = torch.nn.functional.layer_norm(part, (width,), eps=eps)
        torch.addcmul(offset[:, row : row + 1], normal, factor[:, row : row + 1], out=place)
    return joined


@norm_modulate_int8.register(HALF, when=has_half)
def norm_modulate_int8_half(
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
    x = norm_modulate_half(text, video, weight, bias, eps, scale, shift)
    return (*_quantize(x.flatten(0, 1), block), *([magnitudes_half(x)] if outliers else []))


@gelu_int8.register(HALF, when=has_half)
def gelu_int8_half(
    x: torch.Tensor,
    block: int,
    outliers: bool = False,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Quantized:
    check_gelu(x, block, out)
    y = torch.nn.functional.gelu(x, approximate="tanh")
    made = _quantize(y.flatten(0, 1), block, None if out is None else out[0])
    if out is not None:
        made = out[0], out[1].copy_(made[1])
    return (*made, *([magnitudes_half(y)] if outliers else []))


def _all_half(
    text: torch.Tensor, video: torch.Tensor, y: torch.Tensor, gate: torch.Tensor, out: object = None
) -> bool:
    return has_half(text) and all(one.dtype == text.dtype for one in (video, y, gate))


@gate_residual.register(HALF, when=_all_half)
def gate_residual_half(
    text: torch.Tensor,
    video: torch.Tensor,
    y: torch.Tensor,
    gate: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    check_gate_residual(text, video, y, gate, out)
    words = text.shape[1]
    new_text, new_video = out or (None, None)
    return (
        torch.addcmul(text, gate[:, 1:], y[:, :words], out=new_text),
        torch.addcmul(video, gate[:, :1], y[:, words:], out=new_video),
    )


def _quantize(
    x: torch.Tensor, block: int, q: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotated and quantized, some rows at a time."""
    if block <= 1:
        return quantize_rows_half(x, 1.0, q)
    q = torch.empty(x.shape, dtype=torch.int8, device=x.device) if q is None else q
    scale = torch.empty((x.shape[0], 1), dtype=torch.float32, device=x.device)
    for part, out, row_scale in in_pieces(x, q, scale):
        row_scale.copy_(quantize_rows_half(*rotated_rows(part, block), out)[1])
    return q, scale
