"""A CogVideoX block in few passes, for whichever modules hold its weights: free of diffusers and ComfyUI.

    x = norm1(tokens) * (1 + scale) + shift          one pass, quantized in it where the format is INT8
    q, k, v = x Wᵀ                                   one product where their formats and rotations agree
    tokens += gate * attn_out(attention(rotary(norm(q)), rotary(norm(k)), v))
    tokens += gate * ff_out(gelu(ff_proj(norm2(tokens) * (1 + scale) + shift)))

Text tokens come before video tokens; scale, shift and gate differ between the two. The format of each linear
comes from the run, which is told what ran and, where it watches them, the outlier ratios of the inputs.
A linear in another format than INT8, or whose float input someone wants to see, goes through `run.linear`.

A batch of long rows goes through the attention one row after the other, then through the feed-forward, with
the same numbers; weights are cast to INT8 once for all rows. In units of the hidden states of one row (N, D),
16 bits, a CFG batch in INT8 so holds 8 at the most: 2 that came in, 2 that go out, and in the attention of a
row q, k, v and what comes of them; 3.5 in its feed-forward. Other formats hold 2 more: the input of q, k and
v, and one of them twice. Beside them the weights that are cast. The wide inside of a feed-forward is never
there for all rows at once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ..kernels import (
    gate_residual,
    gelu_int8,
    hadamard_quantize_int8,
    int8_linear,
    int8_weight,
    magnitudes,
    norm_modulate,
    norm_modulate_int8,
    norm_rotary_,
    ratio_of,
)
from .block_parts import BlockLinear, BlockParts, Norm
from .linear import mixed_linear
from .quantized import QuantizedWeight
from .run import Pair, RunState

Rotary = tuple[torch.Tensor, torch.Tensor]
Quantized = tuple[torch.Tensor, ...]  # values, row scales, and the magnitudes where they were asked for
QKV = ("q", "k", "v")
PIECE = 4608  # rows of the feed-forward's inside that are there in 16 bits at once, about
Modulation = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # shift, scale and gate, each (B, 2, D)


@dataclass(frozen=True)
class _Input:
    """The input (B, N, K) of linears: as it is, or quantized in the pass that makes it."""

    batch: int
    dtype: torch.dtype
    plain: Callable[[], torch.Tensor]
    quantized: Callable[[int, bool], Quantized]  # (rotation block, whether to give the magnitudes)


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
    first, second = (_modulation(make(activated)) for make in parts.modulations)
    batch, tokens = video.shape[0], video.shape[1] + text.shape[1]
    apart = batch > 1 and tokens >= PIECE and not parts.together and not run.wants_inputs
    rows = [(Rows(run, (row,)), slice(row, row + 1)) for row in range(batch)] if apart else [(Rows(run), ...)]
    new_video, new_text = video.new_empty(video.shape), text.new_empty(text.shape)
    casts = Casts()
    for one, at in rows:
        out = new_text[at], new_video[at]
        _attention(one, index, parts, casts, video[at], text[at], _of(first, at), rotary, out)
    casts = Casts()
    for one, at in rows:
        _feed_forward(one, index, parts, casts, (new_text[at], new_video[at]), _of(second, at))
    return new_video, new_text


def _of(modulation: Modulation, at: Any) -> Modulation:
    shift, scale, gate = modulation
    return shift[at], scale[at], gate[at]


class Casts:
    """Weights of a block's linears as INT8, cast when first asked for."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, ...], tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = {}

    def __call__(
        self, linears: Mapping[str, BlockLinear]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Values, scales and bias of linears side by side, as `int8_linear` takes them."""
        kinds = tuple(linears)
        if kinds not in self._made:
            weights = [one.weight for one in linears.values()]
            cast = int8_weight([(one.data, one.scale, one.global_scale) for one in weights])
            self._made[kinds] = *cast, _beside([one.bias for one in linears.values()], weights)
        return self._made[kinds]


def _beside(biases: Sequence[torch.Tensor | None], weights: Sequence[QuantizedWeight]) -> torch.Tensor | None:
    """The biases of linears as one, zeros where there is none; None if there is none at all."""
    if len(biases) == 1 or all(bias is None for bias in biases):
        return biases[0]
    like = next(bias for bias in biases if bias is not None)
    given = zip(biases, weights, strict=True)
    return torch.cat([like.new_zeros(one.out_features) if bias is None else bias for bias, one in given])


@dataclass(frozen=True)
class Rows:
    """What a block asks of a run, of some rows of the batch; of all without `rows`."""

    run: RunState
    rows: tuple[int, ...] | None = None

    @property
    def watches_outliers(self) -> bool:
        """See `RunState.watches_outliers`."""
        return self.run.watches_outliers

    @property
    def wants_inputs(self) -> bool:
        """See `RunState.wants_inputs`."""
        return self.run.wants_inputs

    def in_int8(self, index: int, linears: Mapping[str, BlockLinear]) -> bool:
        """Whether these linears can share one input that is quantized in the pass that makes it."""
        formats, rotations = self.run.formats(index), {one.weight.hadamard for one in linears.values()}
        return (
            not self.wants_inputs
            and len(rotations) == 1
            and all(formats[kind] == "int8" and one.branch is None for kind, one in linears.items())
        )

    def part(self, index: int, kind: str, linear: BlockLinear, x: torch.Tensor) -> torch.Tensor:
        """A linear, and what runs beside it, on some rows of its input, for which `ran` is told later."""
        y = mixed_linear(x, linear.weight, linear.bias, self.run.formats(index)[kind])
        return y if linear.branch is None else linear.branch(x, y)

    def ran(self, index: int, kinds: Sequence[str], tokens: int, ratio: torch.Tensor | None) -> None:
        """See `RunState.ran`."""
        self.run.ran(index, kinds, tokens, ratio, self.rows)

    def linear(self, index: int, kind: str, linear: BlockLinear, x: torch.Tensor) -> torch.Tensor:
        """`RunState.linear`, and what runs beside it."""
        given = (index, kind, x, linear.weight, linear.bias)
        y = self.run.linear(*given) if self.rows is None else self.run.linear(*given, self.rows)
        return y if linear.branch is None else linear.branch(x, y)


# A large tensor is handed on without a name, so that it is freed as soon as it is used.


def _attention(
    run: Rows,
    index: int,
    parts: BlockParts,
    casts: Casts,
    video: torch.Tensor,
    text: torch.Tensor,
    modulation: Modulation,
    rotary: Rotary | None,
    out: Pair,
) -> None:
    """Text and video after the attention, written to `out`."""
    shift, scale, gate = modulation
    project = partial(_project, run, index, parts, casts)
    y = project(
        ("attn_out",),
        _as_it_is(
            _attend(
                parts,
                project(QKV, _modulated(parts.norms[0], video, text, scale, shift)),
                rotary,
                text.shape[1],
            )
        ),
    )
    gate_residual(text, video, y, gate, out)


def _feed_forward(
    run: Rows, index: int, parts: BlockParts, casts: Casts, streams: Pair, modulation: Modulation
) -> None:
    """Text and video after the feed-forward, in place of what they were."""
    shift, scale, gate = modulation
    text, video = streams
    x = _modulated(parts.norms[1], video, text, scale, shift)
    if all(run.in_int8(index, {kind: parts.linears[kind]}) for kind in ("ff_proj", "ff_out")):
        y = _feed_forward_int8(run, index, parts, casts, x)
    elif run.wants_inputs:
        project = partial(_project, run, index, parts, casts)
        y = project(("ff_out",), _activated(project(("ff_proj",), x)))
    else:
        y = _feed_forward_plain(run, index, parts, x)
    gate_residual(text, video, y, gate, streams)


def _feed_forward_plain(run: Rows, index: int, parts: BlockParts, x: _Input) -> torch.Tensor:
    """The two linears in any format and the GELU, (B, N, D), piece by piece."""
    proj, out, plain = parts.linears["ff_proj"], parts.linears["ff_out"], x.plain()
    batch, tokens, width = plain.shape
    pieces, found = _pieces(batch, tokens), []
    rows, y = plain.view(-1, width), plain.new_empty(batch * tokens, width)
    for first, last in pieces:
        inside = nn.functional.gelu(run.part(index, "ff_proj", proj, rows[first:last]), approximate="tanh")
        if run.watches_outliers:
            found.append(magnitudes(inside.view(-1, min(last - first, tokens), inside.shape[1])))
        y[first:last] = run.part(index, "ff_out", out, inside)
    run.ran(index, ("ff_proj",), tokens, ratio_of([magnitudes(plain)]) if run.watches_outliers else None)
    run.ran(index, ("ff_out",), tokens, _item_ratios(found, pieces, tokens) if found else None)
    return y.view(batch, tokens, width)


def _feed_forward_int8(run: Rows, index: int, parts: BlockParts, casts: Casts, x: _Input) -> torch.Tensor:
    """The two linears and the GELU, (B, N, D); the inside is quantized piece by piece, as it is made."""
    proj, out = parts.linears["ff_proj"], parts.linears["ff_out"]
    weight, weight_out = casts({"ff_proj": proj}), casts({"ff_out": out})
    q, row_scale, *measured = x.quantized(proj.weight.hadamard, run.watches_outliers)
    tokens = q.shape[0] // x.batch
    run.ran(index, ("ff_proj",), tokens, ratio_of(measured) if measured else None)
    inside = q.new_empty((q.shape[0], proj.weight.out_features)), torch.empty_like(row_scale)
    pieces = _pieces(x.batch, tokens)
    found = []
    for first, last in pieces:
        found += gelu_int8(
            int8_linear(q[first:last], row_scale[first:last], *weight, x.dtype).view(
                -1, min(last - first, tokens), inside[0].shape[1]
            ),
            out.weight.hadamard,
            run.watches_outliers,
            (inside[0][first:last], inside[1][first:last]),
        )[2:]
    ratio = _item_ratios(found, pieces, tokens) if found else None
    run.ran(index, ("ff_out",), tokens, ratio)
    del q, row_scale
    return int8_linear(*inside, *weight_out, x.dtype).view(x.batch, tokens, -1)


def _pieces(batch: int, tokens: int) -> list[tuple[int, int]]:
    """First and last row of each piece: all rows, where they are few, else even parts of each item."""
    if batch * tokens <= PIECE:
        return [(0, batch * tokens)]
    size = -(-tokens // -(-tokens // PIECE))
    return [
        (item * tokens + first, item * tokens + min(first + size, tokens))
        for item in range(batch)
        for first in range(0, tokens, size)
    ]


def _item_ratios(
    found: Sequence[torch.Tensor], pieces: Sequence[tuple[int, int]], tokens: int
) -> torch.Tensor:
    """(B,) outlier ratios from the magnitudes of `_pieces`."""
    if len(pieces) == 1:
        return ratio_of(found)
    items: dict[int, list[int]] = {}
    for number, (first, _) in enumerate(pieces):
        items.setdefault(first // tokens, []).append(number)
    return torch.cat(
        [
            ratio_of([found[n] for n in numbers], [pieces[n][1] - pieces[n][0] for n in numbers])
            for numbers in items.values()
        ]
    )


def _project(
    run: Rows, index: int, parts: BlockParts, casts: Casts, kinds: tuple[str, ...], x: _Input
) -> torch.Tensor:
    """The linears `kinds` on one input, side by side: (B, N, sum of their widths)."""
    linears = {kind: parts.linears[kind] for kind in kinds}
    if not run.in_int8(index, linears):
        plain = x.plain()
        if len(kinds) == 1:
            return run.linear(index, kinds[0], linears[kinds[0]], plain)
        widths = [one.weight.out_features for one in linears.values()]
        y = plain.new_empty(*plain.shape[:2], sum(widths))
        for (kind, one), place in zip(linears.items(), y.split(widths, dim=2), strict=True):
            place.copy_(run.linear(index, kind, one, plain))
        return y
    batch, dtype = x.batch, x.dtype
    q, row_scale, *measured = x.quantized(linears[kinds[0]].weight.hadamard, run.watches_outliers)
    del x  # it may hold what was quantized
    run.ran(index, kinds, q.shape[0] // batch, ratio_of(measured) if measured else None)
    y = int8_linear(q, row_scale, *casts(linears), dtype)
    return y.view(batch, -1, y.shape[1])


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
        return (*rows, magnitudes(x)) if outliers else rows

    return _Input(x.shape[0], x.dtype, lambda: x, quantized)


def _attend(parts: BlockParts, qkv: torch.Tensor, rotary: Rotary | None, words: int) -> torch.Tensor:
    """Attention over (B, N, 3 D), which norm and rotation change in place: (B, N, D), contiguous."""
    norms = [None if norm is None else (norm.weight, norm.bias) for norm in (parts.norm_q, parts.norm_k)]
    eps = next((norm.eps for norm in (parts.norm_q, parts.norm_k) if norm is not None), 0.0)
    norm_rotary_(qkv, parts.heads, *norms, eps, rotary, words)
    batch, tokens, width = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    q, k, v = qkv.view(batch, tokens, 3, parts.heads, -1).permute(2, 0, 3, 1, 4)
    del qkv
    attended = parts.attention(q, k, v)
    del q, k, v
    return attended.transpose(1, 2).reshape(batch, tokens, width)


def _modulation(made: torch.Tensor) -> Modulation:
    """(B, 6 D) as shift, scale and gate, (B, 2, D) views each: the video's, then the text's."""
    shift, scale, gate = made.view(made.shape[0], 2, 3, -1).unbind(2)
    return shift, scale, gate
