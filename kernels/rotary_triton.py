"""Triton twin of LayerNorm by head and rotary embedding, in place: a program takes the heads of one token.

The heads of q and of k stand side by side, so that they are one tile, and the token's row of the tables
serves them all.
"""

import torch
import triton
import triton.language as tl

from .rotary import Pair, check_norm_rotary, norm_rotary_
from .support_triton import on_device, supported

VALUES = 8192  # of a program, at most


@triton.jit(do_not_specialize=["tokens", "text_tokens"])
def norm_rotary_kernel(
    qkv_ptr,
    q_weight_ptr,
    q_bias_ptr,
    k_weight_ptr,
    k_bias_ptr,
    cos_ptr,
    sin_ptr,
    tokens,
    text_tokens,
    heads,
    eps,
    SIZE: tl.constexpr,
    NORM_Q: tl.constexpr,
    NORM_K: tl.constexpr,
    ROTARY: tl.constexpr,
    HEADS: tl.constexpr,
    LANES: tl.constexpr,
):
    # grid: (B * N, ceil(2 * heads / HEADS)). LANES: SIZE, the width of a head, rounded up to a power of two
    row = tl.program_id(0)
    token = row % tokens
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    lane = tl.arange(0, LANES)[None, :]
    inside = lane < SIZE
    mask = (head < 2 * heads) & inside
    at = qkv_ptr + row.to(tl.int64) * (3 * heads * SIZE) + head * SIZE + lane
    loaded = tl.load(at, mask=mask, other=0.0)
    x = loaded.to(tl.float32)

    if NORM_Q or NORM_K:
        mean = tl.sum(x, 1) / SIZE
        d = tl.where(inside, x - mean[:, None], 0.0)
        variance = tl.sum(d * d, 1) / SIZE
        d = d * tl.rsqrt(variance + eps)[:, None]
        if NORM_Q:
            weight = tl.load(q_weight_ptr + lane, mask=inside, other=0.0).to(tl.float32)
            bias = tl.load(q_bias_ptr + lane, mask=inside, other=0.0).to(tl.float32)
            x = tl.where(head < heads, d * weight + bias, x)
        if NORM_K:
            weight = tl.load(k_weight_ptr + lane, mask=inside, other=0.0).to(tl.float32)
            bias = tl.load(k_bias_ptr + lane, mask=inside, other=0.0).to(tl.float32)
            x = tl.where(head < heads, x, d * weight + bias)

    if ROTARY:  # noqa: SIM102  (this is decided when compiling, the next when running)
        if token >= text_tokens:
            table = (token - text_tokens).to(tl.int64) * SIZE + lane
            cos = tl.load(cos_ptr + table, mask=inside, other=0.0)
            sin = tl.load(sin_ptr + table, mask=inside, other=0.0)
            even, odd = tl.split(tl.reshape(x, (HEADS, LANES // 2, 2)))
            turned = tl.reshape(tl.join(-odd, even), (HEADS, LANES))
            x = x * cos + turned * sin
    tl.store(at, x.to(loaded.dtype), mask=mask)


@norm_rotary_.register("triton", when=supported)
def norm_rotary_triton_(
    qkv: torch.Tensor,
    heads: int,
    norm_q: Pair | None,
    norm_k: Pair | None,
    eps: float,
    rotary: Pair | None,
    text_tokens: int,
) -> torch.Tensor:
    check_norm_rotary(qkv, heads, norm_q, norm_k, rotary, text_tokens)
    batch, tokens, width = qkv.shape
    size = width // 3 // heads
    lanes = triton.next_power_of_2(size)
    group = max(1, min(triton.next_power_of_2(2 * heads), VALUES // lanes))
    pairs = [
        (qkv, qkv) if pair is None else tuple(t.contiguous() for t in pair)
        for pair in (norm_q, norm_k, rotary)
    ]
    if not qkv.numel() or not (norm_q or norm_k or rotary):
        return qkv
    with on_device(qkv):
        norm_rotary_kernel[(batch * tokens, triton.cdiv(2 * heads, group))](
            qkv,
            *pairs[0],
            *pairs[1],
            *pairs[2],
            tokens,
            text_tokens,
            heads,
            eps,
            SIZE=size,
            NORM_Q=norm_q is not None,
            NORM_K=norm_k is not None,
            ROTARY=rotary is not None,
            HEADS=group,
            LANES=lanes,
            enable_fp_fusion=False,
        )
    return qkv
