"""What a CogVideoX block consists of, by native names: weights, norms and attention of whichever modules."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .quantized import QuantizedWeight

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


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
        together: attention has to see all rows of the batch at once.
    """

    heads: int
    linears: Mapping[str, BlockLinear]
    norms: tuple[Norm, Norm]
    modulations: tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]
    norm_q: Norm | None = None
    norm_k: Norm | None = None
    attention: Attention = nn.functional.scaled_dot_product_attention
    together: bool = False


def block_parts(
    module: Callable[[str], Any],
    linear: Callable[[Any], BlockLinear],
    kinds: Sequence[str],
    heads: int,
    attention: Attention = nn.functional.scaled_dot_product_attention,
    together: bool = False,
) -> BlockParts:
    """Describe a block by its native names.

    Args:
        module: native name inside the block ("q", "norm1.norm", …) -> module; None for one that it lacks.
        linear: module of a quantized linear -> its weight and bias.
        kinds: the family's linears.
        heads: of the attention.
        attention, together: see `BlockParts`.
    """
    return BlockParts(
        heads,
        {kind: linear(module(kind)) for kind in kinds},
        (_norm(module("norm1.norm")), _norm(module("norm2.norm"))),
        (module("norm1.linear"), module("norm2.linear")),
        _norm(module("norm_q")),
        _norm(module("norm_k")),
        attention,
        together,
    )


def _norm(module: Any) -> Norm | None:
    return None if module is None else Norm(module.weight, module.bias, module.eps)
