"""What a run observes of its blocks, per stream, as small float32 tensors that stay on the device.

    gamma  = sum |Y - X| / sum |X|                                  (6Bit-Diffusion, arXiv 2603.18742)
    change = ||(Y - X) - D||_2 / ||D||_2                            D: the block's earlier residual
    magnitudes = max |x|, mean |x|
    outlier ratio = max |x| / mean |x|

X and Y are a block's input and output over the tokens that the caller passes. Divisions are IEEE: by zero
they give inf, zero by zero gives NaN, which a caller reads as "not known".
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .checks import check_float, describe
from .dispatch import Op


@Op
def block_measures(
    inp: torch.Tensor, out: torch.Tensor, previous_delta: torch.Tensor | None = None
) -> torch.Tensor:
    """Measure how much a block changed its input, and how much that differs from an earlier time.

    Args:
        inp: (B, N, D) float16, bfloat16 or float32, the block's input.
        out: (B, N, D), its output.
        previous_delta: (B, N, D) output minus input of an earlier evaluation, or None.

    Returns:
        (B, 2) float32: gamma, and the relative change of the residual (NaN without `previous_delta`).

    Raises:
        ValueError: wrong type or rank, or shapes that differ.
    """
    check_measures(inp, out, previous_delta)
    inp, delta = inp.float(), out.float() - inp.float()
    gamma = delta.abs().sum(dim=(1, 2)) / inp.abs().sum(dim=(1, 2))
    if previous_delta is None:
        return torch.stack([gamma, torch.full_like(gamma, torch.nan)], dim=1)
    previous = previous_delta.float()
    change = (delta - previous).square().sum(dim=(1, 2)).sqrt() / previous.square().sum(dim=(1, 2)).sqrt()
    return torch.stack([gamma, change], dim=1)


@Op
def magnitudes(x: torch.Tensor) -> torch.Tensor:
    """Largest and mean magnitude, per batch item.

    Args:
        x: (B, N, K) float16, bfloat16 or float32.

    Returns:
        (B, 2) float32.

    Raises:
        ValueError: wrong type or rank.
    """
    check_float("magnitudes", x, ndim=3)
    x = x.float().abs()
    return torch.stack([x.amax(dim=(1, 2)), x.mean(dim=(1, 2))], dim=1)


def outlier_ratio(x: torch.Tensor) -> torch.Tensor:
    """(B,) float32: largest over mean magnitude of each item; takes and refuses what `magnitudes` does."""
    return ratio_of([magnitudes(x)])


def ratio_of(pieces: Sequence[torch.Tensor], sizes: Sequence[int] = (1,)) -> torch.Tensor:
    """The outlier ratio (B,) of what was measured in pieces.

    Args:
        pieces: `magnitudes` (B, 2) of each.
        sizes: how much each counts: tokens, or any multiple of them.
    """
    largest, mean = pieces[0].unbind(1)
    if len(pieces) > 1:
        largest = torch.stack([piece[:, 0] for piece in pieces]).amax(dim=0)
        means = zip(pieces, sizes, strict=True)
        mean = torch.stack([piece[:, 1] * (size / sum(sizes)) for piece, size in means]).sum(dim=0)
    return largest / mean


def check_measures(inp: torch.Tensor, out: torch.Tensor, previous_delta: torch.Tensor | None) -> None:
    """What `block_measures` and its twins refuse."""
    for tensor in (inp, out, previous_delta):
        if tensor is None:
            continue
        check_float("block_measures", tensor, ndim=3)
        if tensor.shape != inp.shape:
            raise ValueError(
                f"block_measures needs tensors of one shape, got {describe(inp)} and {describe(tensor)}"
            )
