"""A CogVideoX block in few passes, for whichever modules hold its weights: free of diffusers and ComfyUI.

    x = norm1(tokens) * (1 + scale) + shift          one pass, quantized in it where the format is INT8
    q, k, v = x Wᵀ                                   one product where their formats and rotations agree
    tokens += gate * attn_out(attention(rotary(norm(q)), rotary(norm(k)), v))
    tokens += gate * ff_out(gelu(ff_proj(norm2(tokens) * (1 + scale) + shift)))

Text tokens come before video tokens; scale, shift and gate differ between the two. The format of each linear
comes from the run, which is told what ran and, where it watches them, the outlier ratios of the inputs.
A linear in another format than INT8, or whose float input someone wants to see, goes through `run.linear`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..kernels import (
    gate_residual,
    gelu_int8,
    hadamard_quantize_int8,
    int8_linear,
    norm_modulate,
    norm_modulate_int8,
    norm_rotary_,
    outlier_ratio,
)
from .quantized import QuantizedWeight
from .run import Pair, RunState

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Rotary = tuple[torch.Tensor, torch.Tensor]
Quantized = tuple[torch.Tensor, ...]  # values, row scales, and the outlier ratio where it was asked for
QKV = ("q", "k", "v")


@dataclass(frozen=True, eq=False)
class BlockLinear:
    """A quantized linear of a block.

    Attributes:
        weight: NVFP4.
        bias: (N,) or None.
        branch: (x, y) -> y and what runs beside the linear on its float input; or None.
    """

    weight: QuantizedWeight
    bias: torch.Tensor | None
    branch: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None


@dataclass(frozen=True, eq=False)
class Norm:
    """A LayerNorm: weight and bias (D,) or None, and eps."""

    weight: torch.Tensor | None
    bias: torch.Tensor | None
    eps: float


@dataclass(frozen=True, eq=False)
class BlockParts:
    """What a block consists of.

    Attributes:
        heads: of the attention.
        linears: by kind.
        norms: before the attention, before the feed-forward.
        modulations: of the two, silu(time embedding) (B, E) -> (B, 6 D): shift, scale, gate of the video,
            then of the text.
        norm_q, norm_k: over a head's width, with one eps; None without.
        attention: (q, k, v as (B, heads, N, d) views) -> (B, heads, N, d).
    """

    heads: int
    linears: Mapping[str, BlockLinear]
    norms: tuple[Norm, Norm]
    modulations: tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]
    norm_q: Norm | None = None
    norm_k: Norm | None = None
    attention: Attention = nn.functional.scaled_dot_product_attention


@dataclass(frozen=True)
class _Input:
    """The input (B, N, K) of linears: as it is, or quantized in the pass that makes it."""

    batch: int
    dtype: torch.dtype
    plain: Callable[[], torch.Tensor]
    quantized: Callable[[int, bool], Quantized]  # (rotation block, whether to give the outlier ratio)


def block_parts(
    module: Callable[[str], Any],
    linear: Callable[[Any], BlockLinear],
    kinds: Sequence[str],
    heads: int,
    attention: Attention = nn.functional.scaled_dot_product_attention,
) -> BlockParts:
    """Describe a block by its native names.

    Args:
        module: native name inside the block ("q", "norm1.norm", …) -> module; None for one that it lacks.
        linear: module of a quantized linear -> its weight and bias.
        kinds: the family's linears.
        heads: of the attention.
        attention: see `BlockParts`.
    """
    return BlockParts(
        heads,
        {kind: linear(module(kind)) for kind in kinds},
        (_norm(module("norm1.norm")), _norm(module("norm2.norm"))),
        (module("norm1.linear"), module("norm2.linear")),
        _norm(module("norm_q")),
        _norm(module("norm_k")),
        attention,
    )


def block_forward(
    run: RunState,
    index: int,
    parts: BlockParts,
    video: torch.Tensor,
    text: torch.Tensor,
    time: torch.Tensor,
    rotary: Rotary | None = None,
) -> Pair:
    """Compute a block; to be called by `run_block`.

    Args:
        index: of the block.
        video: (B, V, D) hidden states, float16, bfloat16 or float32.
        text: (B, T, D).
        time: (B, E) time embedding, before its silu.
        rotary: cos and sin, float32 (V, d), pairs interleaved; None without rotary positions.

    Returns:
        (video, text) after the block, new tensors.
    """
    activated = nn.functional.silu(time)
    text, video = _attention(run, index, parts, video, text, activated, rotary)
    text, video = _feed_forward(run, index, parts, video, text, activated)
    return video, text


# A large tensor is handed on without a name, so that it is freed as soon as it is used.


def _attention(
    run: RunState,
    index: int,
    parts: BlockParts,
    video: torch.Tensor,
    text: torch.Tensor,
    activated: torch.Tensor,
    rotary: Rotary | None,
) -> Pair:
    shift, scale, gate = _modulation(parts.modulations[0](activated))
    y = _project(
        run,
        index,
        parts,
        ("attn_out",),
        _as_it_is(
            _attend(
                parts,
                _project(run, index, parts, QKV, _modulated(parts.norms[0], video, text, scale, shift)),
                rotary,
                text.shape[1],
            )
        ),
    )
    return gate_residual(text, video, y, gate)


def _feed_forward(
    run: RunState,
    index: int,
    parts: BlockParts,
    video: torch.Tensor,
    text: torch.Tensor,
    activated: torch.Tensor,
) -> Pair:
    shift, scale, gate = _modulation(parts.modulations[1](activated))
    y = _project(
        run,
        index,
        parts,
        ("ff_out",),
        _activated(
            _project(run, index, parts, ("ff_proj",), _modulated(parts.norms[1], video, text, scale, shift))
        ),
    )
    return gate_residual(text, video, y, gate)


def _project(run: RunState, index: int, parts: BlockParts, kinds: tuple[str, ...], x: _Input) -> torch.Tensor:
    """The linears `kinds` on one input, side by side: (B, N, sum of their widths)."""
    formats, linears = run.formats(index), [parts.linears[kind] for kind in kinds]
    rotation = linears[0].weight.hadamard
    if run.wants_inputs or not all(
        formats[kind] == "int8" and one.branch is None and one.weight.hadamard == rotation
        for kind, one in zip(kinds, linears, strict=True)
    ):
        plain = x.plain()
        outputs = [_product(run, index, kind, one, plain) for kind, one in zip(kinds, linears, strict=True)]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
    batch, dtype = x.batch, x.dtype
    q, row_scale, *ratio = x.quantized(rotation, run.watches_outliers)
    del x  # it may hold what was quantized, the widest tensor of a block
    run.ran(index, kinds, q.shape[0] // batch, ratio[0] if ratio else None)
    weights = [(one.weight.data, one.weight.scale, one.weight.global_scale) for one in linears]
    y = int8_linear(q, row_scale, weights, [one.bias for one in linears], dtype)
    return y.view(batch, -1, y.shape[1])


def _product(run: RunState, index: int, kind: str, linear: BlockLinear, x: torch.Tensor) -> torch.Tensor:
    y = run.linear(index, kind, x, linear.weight, linear.bias)
    return y if linear.branch is None else linear.branch(x, y)


def _modulated(
    norm: Norm, video: torch.Tensor, text: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor
) -> _Input:
    given = (text, video, norm.weight, norm.bias, norm.eps, scale, shift)
    return _Input(
        video.shape[0],
        video.dtype,
        lambda: norm_modulate(*given),
        lambda block, outliers: norm_modulate_int8(*given, block, outliers),
    )


def _activated(x: torch.Tensor) -> _Input:
    return _Input(
        x.shape[0],
        x.dtype,
        lambda: nn.functional.gelu(x, approximate="tanh"),
        lambda block, outliers: gelu_int8(x, block, outliers),
    )


def _as_it_is(x: torch.Tensor) -> _Input:
    def quantized(block: int, outliers: bool) -> Quantized:
        rows = hadamard_quantize_int8(x.view(-1, x.shape[2]), block)
        return (*rows, outlier_ratio(x)) if outliers else rows

    return _Input(x.shape[0], x.dtype, lambda: x, quantized)


def _attend(parts: BlockParts, qkv: torch.Tensor, rotary: Rotary | None, words: int) -> torch.Tensor:
    """Attention over (B, N, 3 D), which norm and rotation change in place: (B, N, D), contiguous."""
    norms = [None if norm is None else (norm.weight, norm.bias) for norm in (parts.norm_q, parts.norm_k)]
    eps = next((norm.eps for norm in (parts.norm_q, parts.norm_k) if norm is not None), 0.0)
    norm_rotary_(qkv, parts.heads, *norms, eps, rotary, words)
    batch, tokens, width = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    q, k, v = qkv.view(batch, tokens, 3, parts.heads, -1).permute(2, 0, 3, 1, 4)
    return parts.attention(q, k, v).transpose(1, 2).reshape(batch, tokens, width)


def _modulation(made: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(B, 6 D) as shift, scale and gate, (B, 2, D) views each: the video's, then the text's."""
    shift, scale, gate = made.view(made.shape[0], 2, 3, -1).unbind(2)
    return shift, scale, gate


def _norm(module: Any) -> Norm | None:
    return None if module is None else Norm(module.weight, module.bias, module.eps)
