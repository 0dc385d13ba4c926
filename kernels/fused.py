"""What a transformer block does between its products, each in one pass.

    norm_modulate   LayerNorm(x) * (1 + scale) + shift, as (x - mean) / deviation * factor + offset
    gate_residual   x + gate * y

Text rows stand before video rows in each batch item of what is joined, (B, N, D) with N = T + V; they come in
and go out as two tensors. scale, shift and gate are (B, 2, D): [:, 0] for the video, [:, 1] for the text.
Everything is computed in float32 and rounded once, but for factor = weight (1 + scale) and offset = bias (1 +
scale) + shift, one of each per column, which are rounded to the type of x as well. The forms that quantize
are, by definition, the same numbers, rounded to the type of x, then `hadamard_quantize_int8`; with `outliers`
they also give the `magnitudes` of what is quantized, before its rotation: the parts of its `outlier_ratio`,
the sum before or after rounding to the type of x.
"""

from __future__ import annotations

import torch

from .checks import check_block, check_float, check_shape, check_streams, describe
from .dispatch import Op
from .hadamard import hadamard_quantize_int8
from .measures import magnitudes

Quantized = tuple[torch.Tensor, ...]


@Op
def norm_modulate(
    text: torch.Tensor,
    video: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    scale: torch.Tensor,
    shift: torch.Tensor,
) -> torch.Tensor:
    """Normalize each token, modulate it by stream, and join the streams.

    Args:
        text: (B, T, D) float16, bfloat16 or float32; T may be 0.
        video: (B, V, D), same type.
        weight, bias: of the LayerNorm, (D,) of a float type, or None.
        eps: of the LayerNorm.
        scale, shift: (B, 2, D) of a float type.

    Returns:
        (B, T + V, D) in the type of `video`.

    Raises:
        ValueError: if types or shapes do not belong together.
    """
    check_norm_modulate("norm_modulate", text, video, weight, bias, scale, shift)
    x = torch.cat([text, video], dim=1).float()
    x = torch.nn.functional.layer_norm(x, x.shape[-1:], eps=eps)
    factor = 1 + scale.float()
    offset = shift.float() if bias is None else shift.float() + bias.float() * factor
    factor = factor if weight is None else factor * weight.float()
    factor, offset = (per_token(t.to(video.dtype), text, video) for t in (factor, offset))
    return (x * factor + offset).to(video.dtype)


@Op
def norm_modulate_int8(
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
    """`norm_modulate`, rotated in blocks of `block` and quantized to INT8 by rows.

    Args:
        text, video, weight, bias, eps, scale, shift: as `norm_modulate`.
        block: of the rotation, a power of two, at most 128, that divides D; 0 or 1 means no rotation.
        outliers: also measure the magnitudes of each batch item.

    Returns:
        q (B * (T + V), D) int8 and its scale (B * (T + V), 1) float32, as `hadamard_quantize_int8`; and with
        `outliers` the `magnitudes`, (B, 2) float32.

    Raises:
        ValueError: if types or shapes do not belong together, or a block cannot tile D.
    """
    check_norm_modulate("norm_modulate_int8", text, video, weight, bias, scale, shift)
    check_block("norm_modulate_int8", video.shape[2], block)
    return _quantize(norm_modulate(text, video, weight, bias, eps, scale, shift), block, outliers)


@Op
def gelu_int8(
    x: torch.Tensor,
    block: int,
    outliers: bool = False,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Quantized:
    """GELU (tanh), rounded to the type of x, rotated in blocks of `block` and quantized to INT8 by rows.

    Args:
        x: (B, N, K) float16, bfloat16 or float32.
        block: of the rotation, a power of two, at most 128, that divides K; 0 or 1 means no rotation.
        outliers: also measure the magnitudes of the GELU's output, of each batch item.
        out: contiguous tensors to put q and its scale into, in place of new ones.

    Returns:
        q (B * N, K) int8 and its scale (B * N, 1) float32, as `hadamard_quantize_int8`; and with `outliers`
        the `magnitudes`, (B, 2) float32.

    Raises:
        ValueError: wrong type or rank, a block that cannot tile K, or an `out` of another size.
    """
    check_gelu(x, block, out)
    made = _quantize(torch.nn.functional.gelu(x.float(), approximate="tanh").to(x.dtype), block, outliers)
    if out is None:
        return made
    for place, values in zip(out, made[:2], strict=True):
        place.copy_(values)
    return (*out, *made[2:])


@Op
def gate_residual(
    text: torch.Tensor,
    video: torch.Tensor,
    y: torch.Tensor,
    gate: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add what a block computed to its streams, by a gate.

    Args:
        text: (B, T, D) float16, bfloat16 or float32; T may be 0.
        video: (B, V, D), same type.
        y: (B, T + V, D) of a float type.
        gate: (B, 2, D) of a float type.
        out: contiguous tensors like `text` and `video`, or these themselves, to write the new ones to.

    Returns:
        The new text and video, in the types of the old ones; `out` if given.

    Raises:
        ValueError: if types or shapes do not belong together.
    """
    check_gate_residual(text, video, y, gate, out)
    moved = per_token(gate, text, video) * y.float()
    tokens = text.shape[1]
    made = (
        (text.float() + moved[:, :tokens]).to(text.dtype),
        (video.float() + moved[:, tokens:]).to(video.dtype),
    )
    return made if out is None else (out[0].copy_(made[0]), out[1].copy_(made[1]))


def per_token(modulation: torch.Tensor, text: torch.Tensor, video: torch.Tensor) -> torch.Tensor:
    """(B, 2, D) of any float type as float32 (B, T + V, D): what each token is modulated by."""
    video_part, text_part = modulation.float().unbind(dim=1)
    return torch.cat([text_part[:, None].expand(text.shape), video_part[:, None].expand(video.shape)], dim=1)


def check_norm_modulate(
    name: str,
    text: torch.Tensor,
    video: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: torch.Tensor,
    shift: torch.Tensor,
) -> None:
    """What `norm_modulate`, `norm_modulate_int8` and their twins refuse."""
    check_streams(name, text, video)
    batch, _, width = video.shape
    for what, vector in (("weight", weight), ("bias", bias)):
        if vector is not None:
            check_shape(name, what, vector, (width,))
    for what, modulation in (("scale", scale), ("shift", shift)):
        check_shape(name, what, modulation, (batch, 2, width))


def check_gelu(x: torch.Tensor, block: int, out: tuple[torch.Tensor, torch.Tensor] | None) -> None:
    """What `gelu_int8` and its twins refuse."""
    check_float("gelu_int8", x, ndim=3)
    check_block("gelu_int8", x.shape[2], block)
    if out is None:
        return
    if len(out) != 2:
        raise ValueError(f"gelu_int8 needs out as two tensors, q and its scale, got {len(out)}")
    rows = x.shape[0] * x.shape[1]
    for place, dtype, width in zip(out, (torch.int8, torch.float32), (x.shape[2], 1), strict=True):
        if place.dtype != dtype or place.shape != (rows, width) or not place.is_contiguous():
            raise ValueError(
                f"gelu_int8 needs out as contiguous {dtype} {(rows, width)}, got {describe(place)}"
            )


def check_gate_residual(
    text: torch.Tensor,
    video: torch.Tensor,
    y: torch.Tensor,
    gate: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    """What `gate_residual` and its twins refuse."""
    check_streams("gate_residual", text, video)
    batch, tokens, width = video.shape
    check_shape("gate_residual", "y", y, (batch, text.shape[1] + tokens, width))
    check_shape("gate_residual", "gate", gate, (batch, 2, width))
    for place, like in zip(out or (), (text, video), strict=out is not None):
        if place.dtype != like.dtype or place.shape != like.shape or not place.is_contiguous():
            raise ValueError(
                f"gate_residual needs out as contiguous tensors like its streams, got {describe(place)}"
            )


def _quantize(x: torch.Tensor, block: int, outliers: bool) -> Quantized:
    q, row_scale = hadamard_quantize_int8(x.flatten(0, 1), block)
    return (q, row_scale, magnitudes(x)) if outliers else (q, row_scale)
