"""LayerNorm of each head of q and k, then rotary position embedding of the video tokens, in place.

    y = LayerNorm(x) over a head          z[2i]     = y[2i]     * cos[2i]     - y[2i + 1] * sin[2i]
                                          z[2i + 1] = y[2i + 1] * cos[2i + 1] + y[2i]     * sin[2i + 1]

q, k and v stand side by side, as one product of their three weights gives them; v is left alone.
"""

from __future__ import annotations

import torch

from .checks import check_float, check_shape, describe
from .dispatch import Op

Pair = tuple[torch.Tensor, torch.Tensor]


@Op
def norm_rotary_(
    qkv: torch.Tensor,
    heads: int,
    norm_q: Pair | None,
    norm_k: Pair | None,
    eps: float,
    rotary: Pair | None,
    text_tokens: int,
) -> torch.Tensor:
    """Normalize and rotate q and k in place, in float32, rounded once.

    Args:
        qkv: (B, N, 3 D) float16, bfloat16 or float32, contiguous: [q | k | v], each of `heads` heads.
        heads: number of heads; D / heads is even.
        norm_q, norm_k: weight and bias of the LayerNorm over a head, each (D / heads,) of a float type; None
            leaves q, or k, as it is.
        eps: of the LayerNorms.
        rotary: cos and sin, float32 (N - text_tokens, D / heads), for the video tokens; None for no rotation.
        text_tokens: how many tokens at the start of each batch item are text, which is not rotated.

    Returns:
        `qkv` itself.

    Raises:
        ValueError: if types or shapes do not belong together.
    """
    check_norm_rotary(qkv, heads, norm_q, norm_k, rotary, text_tokens)
    size = qkv.shape[2] // 3 // heads
    for part, norm in zip(
        qkv.view(*qkv.shape[:2], 3, heads, size).unbind(2)[:2], (norm_q, norm_k), strict=True
    ):
        x = part.float()
        if norm is not None:
            x = torch.nn.functional.layer_norm(x, (size,), norm[0].float(), norm[1].float(), eps)
        if rotary is not None:
            video = x[:, text_tokens:]
            cos, sin = (table[None, :, None] for table in rotary)
            turned = torch.stack([-video[..., 1::2], video[..., ::2]], dim=-1).flatten(-2)
            x = torch.cat([x[:, :text_tokens], video * cos + turned * sin], dim=1)
        part.copy_(x)
    return qkv


def check_norm_rotary(
    qkv: torch.Tensor,
    heads: int,
    norm_q: Pair | None,
    norm_k: Pair | None,
    rotary: Pair | None,
    text_tokens: int,
) -> None:
    """What `norm_rotary_` and its twins refuse."""
    name = "norm_rotary_"
    check_float(name, qkv, ndim=3)
    _, tokens, width = qkv.shape
    if not qkv.is_contiguous():
        raise ValueError(f"{name} works in place and needs a contiguous qkv, got strides {qkv.stride()}")
    if heads < 1 or width % (6 * heads):
        raise ValueError(f"{name} needs qkv with 3 x {heads} heads of an even size, got {describe(qkv)}")
    if not 0 <= text_tokens <= tokens:
        raise ValueError(f"{name} needs text_tokens from 0 to {tokens}, got {text_tokens}")
    size = width // 3 // heads
    for what, norm in (("norm_q", norm_q), ("norm_k", norm_k)):
        for vector in norm or ():
            check_shape(name, what, vector, (size,))
    for table in rotary or ():
        check_shape(name, "rotary", table, (tokens - text_tokens, size))
        if table.dtype != torch.float32:
            raise ValueError(f"{name} needs rotary as float32, got {describe(table)}")
