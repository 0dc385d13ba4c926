"""NVFP4 weights decoded in a few 16-bit passes of plain PyTorch, for a GPU without Triton.

e2m1 * scale has six significant bits, so it is exact in float16 and bfloat16; the global scale comes last.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .hadamard import hadamard_signs
from .int8 import row_scales
from .nvfp4 import NVFP4_BLOCK, byte_pairs

VALUES = 1 << 24  # of a float32 copy at a time


def decode_weight(
    data: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor, dtype: torch.dtype, hadamard: int
) -> torch.Tensor:
    """A weight (N, K) of a 16-bit `dtype`, rotated back; rounded there, and by its global scale.

    e2m1 * scale / 64 is exact, and so small that no sum over a block overflows float16.
    """
    values = _e2m1(data, dtype)
    values.view(*scale.shape, NVFP4_BLOCK).mul_((scale.float() / 64).to(dtype)[..., None])
    factor = 64 * max(hadamard, 1) ** -0.5
    # As a column, since a CUDA kernel takes a tensor without axes in 16 bits.
    return block_sums(values, hadamard).mul_((global_scale * factor).reshape(-1, 1))


def cast_weight(
    data: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor, q: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight as INT8 (N, K), in `q` if given, and its scales (N, 1), bit for bit `cast_nvfp4_to_int8`'s.

    Of values so coarse many quotients are ties, which float32 would break otherwise than the reference.
    """
    total = scale.float() * global_scale
    if q is None:
        q = torch.empty((data.shape[0], data.shape[1] * 2), dtype=torch.int8, device=data.device)
    channel_scale = torch.empty((data.shape[0], 1), device=data.device)
    for out, codes, by, kept in in_pieces(q, data, total, channel_scale):
        weight = (_e2m1(codes, torch.float16).view(*by.shape, -1) * by[..., None]).view(out.shape)
        made, inverse = row_scales(weight.abs().amax(dim=1, keepdim=True))
        out.copy_(weight.double().mul_(inverse).round_())
        kept.copy_(made)
    return q, channel_scale


def block_sums(x: torch.Tensor, block: int) -> torch.Tensor:
    """x H over the last axis, in the 16-bit type of x: up to `block` times as large."""
    if block <= 1:
        return x
    return (x.reshape(-1, block) @ hadamard_signs(block, x.device).to(x.dtype)).view(x.shape)


def rotated_rows(x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor | float]:
    """x H (M, K), and what it is to be multiplied by: (M, 1) for float16, whose rows are brought near 1 first
    by powers of two, so that no sum overflows and none is lost."""
    if block <= 1 or x.dtype != torch.float16:
        return block_sums(x, block), max(block, 1) ** -0.5
    amax = x.abs().amax(dim=1, keepdim=True).float()
    power = torch.where(torch.isfinite(amax) & (amax > 0), torch.frexp(amax).exponent, 0)
    near_one = torch.mul(x, torch.ldexp(torch.ones_like(amax), -power), out=torch.empty_like(x))
    return block_sums(near_one, block), torch.ldexp(torch.full_like(amax, block**-0.5), power)


def quantize_rows_half(
    x: torch.Tensor, factor: torch.Tensor | float, q: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`int8.quantize_rows` of 16-bit `x` (M, K), products and rounding in float32, into `q` if given."""
    q = torch.empty(x.shape, dtype=torch.int8, device=x.device) if q is None else q
    scale, inverse = row_scales(x.abs().amax(dim=1, keepdim=True).float(), factor)
    for part, by, out in in_pieces(x, inverse, q):
        out.copy_((part * by).round_())
    return q, scale


def in_pieces(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Rows of tensors, as many at a time as hold about `VALUES` of the first."""
    pieces = max(1, -(-tensors[0].numel() // VALUES))
    return zip(*(tensor.tensor_split(pieces) for tensor in tensors), strict=True)


def _e2m1(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values of packed codes, (N, K) of a 16-bit `dtype`."""
    pairs = byte_pairs(data.device, dtype).index_select(0, data.reshape(-1).int())
    return pairs.view(dtype).view(data.shape[0], -1)
