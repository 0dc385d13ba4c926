"""Second moments R = E[xxᵀ] of what block linears read, from the checkpoint alone (ours): no calibration.

The normalized tokens are taken as white: z of zero mean and unit variance, channels uncorrelated. All that a
checkpoint adds to them is known. adaLN's shift and scale depend on the timestep t alone; with w and b of the
LayerNorm, those of the video tokens, and every expectation also over timesteps:

    after a norm    x = f∘z + s,  f = w∘(1 + scale_t),  s = b∘(1 + scale_t) + shift_t
                    R = diag(E f²) + E ssᵀ
    of the values   v = W x + c;  attention averages over tokens, which leaves the mean m = W s + c
                    as it is and shrinks the rest, to 1/16 here
                    R = W diag(E f²) Wᵀ / 16 + E mmᵀ
    after the GELU  h = W x + c, normal by the sum, of mean m, variance (W∘W) f² and the correlation ρ that
                    W diag(E f²) Wᵀ has; gelu(h) = Σ aₙ heₙ, orthonormal Hermite polynomials
                    R = E a₀a₀ᵀ + a₁a₁ᵀ∘ρ + a₂a₂ᵀ∘ρ∘ρ, on its diagonal the second moment itself

The last is Mehler's formula to the second order, aₙ by Gauss-Hermite quadrature; a₁ and a₂ are means over
timesteps before they are multiplied. Only blocks on the diagonal
of R are made, each of whole blocks of the rotation H, so that H R H has the same. After a norm they are those
of the rotation, since little but single channels counts there; where another linear stands between, the
channels vary in fewer directions than there are channels, which large blocks show. What each linear reads a
family tells (`ModelFamily.sources`).
"""

import numpy as np
import torch
from torch.nn.functional import gelu

from ..kernels import hadamard_block_size
from .checkpoint import Checkpoint

TIMES = 50  # timesteps that stand for all, evenly spaced
AVERAGED = 1 / 16  # of the values' variance that attention leaves; between 1 and 1/64 little depends on it
LARGEST_BLOCK = 2048  # columns, where another linear stands between; time and memory grow with it
_POINTS = 16  # of the quadrature
_TINY = 1e-30


def linear_moments(checkpoint: Checkpoint, layer: str, embedded: torch.Tensor) -> torch.Tensor | None:
    """Diagonal blocks of E[xxᵀ] of a block linear's input x (K).

    Args:
        layer: native name, "blocks.0.q".
        embedded: (timesteps, time_embed_dim) float32 of `time_inputs`, on the device to compute on.

    Returns:
        (G, B, B) float32, G·B = K and B a multiple of the rotation's block; None where the family does not
        tell what the linear reads.

    Raises:
        CheckpointError: a tensor before the linear with NaN or Inf.
    """
    block, _, kind = layer.rpartition(".")
    source = dict(checkpoint.family.sources).get(kind)
    if source is None:
        return None
    factor, offset = _modulated(checkpoint, f"{block}.{source.norm}", _spread(embedded))
    variance = factor.square().mean(0)
    if source.through is None:
        size = hadamard_block_size(len(variance))
        return torch.diag_embed(variance.view(-1, size)) + _blocks(offset, size)
    weight, bias = (
        _read(checkpoint, f"{block}.{source.through}.{part}", embedded.device) for part in ("weight", "bias")
    )
    mean, size = torch.addmm(bias, offset, weight.T), block_size(len(weight))
    if source.gelu:
        deviation = (factor.square() @ weight.square().T).sqrt()
        return _through_gelu(mean, deviation, weight * variance.sqrt(), size)
    rows = (weight * (AVERAGED * variance).sqrt()).view(-1, size, weight.shape[1])
    return (rows @ rows.mT).add_(_blocks(mean, size))


def block_size(columns: int) -> int:
    """Columns of a block where another linear stands between: whole blocks of the rotation, the most."""
    step = hadamard_block_size(columns)
    count = columns // step
    most = max(1, LARGEST_BLOCK // step)
    return step * max(n for n in range(1, min(count, most) + 1) if count % n == 0)


def _spread(embedded: torch.Tensor) -> torch.Tensor:
    """At most `TIMES` rows, evenly spaced, from the middles of as many parts."""
    count = min(TIMES, len(embedded))
    return embedded[(2 * torch.arange(count, device=embedded.device) + 1) * len(embedded) // (2 * count)]


def _modulated(
    checkpoint: Checkpoint, norm: str, embedded: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """f and s of the module's formula for video tokens, (T, K) each."""
    weight, bias, linear, offset = (
        _read(checkpoint, f"{norm}.{name}", embedded.device)
        for name in ("norm.weight", "norm.bias", "linear.weight", "linear.bias")
    )
    first = 2 * len(weight)  # shift and scale of the video, before its gate and the text's three
    shift, scale = torch.addmm(offset[:first], embedded, linear[:first].T).chunk(2, dim=1)
    return weight * (1 + scale), bias * (1 + scale) + shift


def _through_gelu(mean: torch.Tensor, deviation: torch.Tensor, rows: torch.Tensor, size: int) -> torch.Tensor:
    """Blocks of R of gelu(h), h normal with mean and deviation (T, K) and the correlation of rows (K, D)."""
    points, shares = np.polynomial.hermite_e.hermegauss(_POINTS)
    squares, zeroth, first, second = (torch.zeros_like(mean) for _ in range(4))
    for point, share in zip(points.tolist(), (shares / shares.sum()).tolist(), strict=True):
        value = gelu(mean + point * deviation, approximate="tanh")
        squares += share * value.square()
        zeroth += share * value
        first += share * point * value
        second += share * (point * point - 1) / 2**0.5 * value
    moments, square = _blocks(zeroth, size), squares.mean(0).view(-1, size)
    first, second = (a.mean(0).view(-1, size) for a in (first, second))
    rows = (rows / rows.norm(dim=1, keepdim=True).clamp(min=_TINY)).view(-1, size, rows.shape[1])
    for block, a, b, directions in zip(moments, first, second, rows, strict=True):
        correlation = directions @ directions.T
        block += (torch.outer(b, b) * correlation).add_(torch.outer(a, a)).mul_(correlation)
    moments.diagonal(dim1=1, dim2=2).copy_(square)
    return moments


def _blocks(means: torch.Tensor, size: int) -> torch.Tensor:
    """(K/size, size, size): E mmᵀ over the rows of means (T, K)."""
    rows = means.view(len(means), -1, size).transpose(0, 1)
    return rows.mT @ rows / len(means)


def _read(checkpoint: Checkpoint, name: str, device: torch.device) -> torch.Tensor:
    return checkpoint.finite(name, device).float()
