"""GPTQ (Frantar et al. 2022, arXiv 2210.17323): round the values of an NVFP4 weight by what it multiplies.

Least squares of the outputs, ‖X(W − Ŵ)ᵀ‖², over sample inputs X, the block scales as they stand: column after
column is rounded, and what is still to come makes up for the errors before it. With H = XᵀX + λI = LLᵀ (L
lower triangular), from the last column j to the first:

    ŵ_j = E2M1(w_j + Σ_{i>j} (w_i − ŵ_i) L_ij / L_jj)

These are the numbers that the Cholesky factor of H's inverse gives in the same order, without an inverse.

Where no samples are at hand, H is what `input_moments` tells of the inputs, block-diagonal (ours): every
block of columns is rounded by itself, many side by side, and no K x K matrix is ever made.
"""

import torch

from ..kernels.nvfp4 import encode_e2m1, round_e2m1
from .quantized import BLOCK

DAMPING = 0.1  # λ as a share of the mean of H's diagonal: from 800 rows, better than 0.01 on unseen clips
MOMENT_DAMPING = 0.3  # of moments that were not measured, but follow from what is assumed of the tokens
_ELEMENTS = (1 << 25, 1 << 21)  # rounded side by side, whole blocks, on a GPU and on a CPU with its cache
_COLUMNS = 128  # rounded one by one before their errors move the columns before them in one product


def input_factor(x: torch.Tensor, damping: float = DAMPING) -> torch.Tensor:
    """The factor L of sample inputs (n, K), rotated as the weight is: (1, K, K) float32, computed in float64.

    Raises:
        ValueError: inputs that are not finite.
    """
    x = x.double()
    return _factor((x.T @ x)[None], damping, "the sample inputs hold NaN or Inf; calibrate again")


def moment_factor(moments: torch.Tensor, damping: float = MOMENT_DAMPING) -> torch.Tensor:
    """The factors of moments E[xxᵀ] of blocks of columns, rotated as the weight is; by float64 too.

    Args:
        moments: (G, B, B) float32, symmetric.

    Returns:
        (G, B, B) float32.

    Raises:
        ValueError: moments that are not finite.
    """
    refusal = "the moments of its inputs overflow; check the weights before it"
    return _factor(moments.double(), damping, refusal)


def _factor(hessians: torch.Tensor, damping: float, refusal: str) -> torch.Tensor:
    """Damped by the mean of all diagonals, and factored in place: 1.2 GB at the 5B's 12288 columns."""
    diagonals = hessians.diagonal(dim1=1, dim2=2)
    mean = diagonals.mean()
    if not torch.isfinite(mean):
        raise ValueError(refusal)
    diagonals.add_(torch.where(mean > 0, damping * mean, 1.0))
    return torch.linalg.cholesky(hessians, out=hessians).float()


def round_by_inputs(
    weight: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor, factor: torch.Tensor
) -> torch.Tensor:
    """NVFP4 values of a weight for given scales.

    Args:
        weight: (N, K) float32, rotated as it will be stored.
        scale: (N, K/16) float8_e4m3fn.
        global_scale: () float32.
        factor: (G, K/G, K/G) float32 of `input_factor` or `moment_factor`; K/G a multiple of 16.

    Returns:
        (N, K/2) uint8, two codes a byte, the even element in the high nibble.
    """
    groups, size, _ = factor.shape
    columns = weight.T.contiguous().view(groups, size, -1)
    steps = (scale.float() * global_scale).T.contiguous().view(groups, size // BLOCK, -1)
    at_once = max(1, _ELEMENTS[weight.device.type == "cpu"] // columns[0].numel())
    codes = torch.cat(
        [_round(*one) for one in zip(*(x.split(at_once) for x in (columns, steps, factor)), strict=True)]
    ).view(weight.shape[1], -1)
    return (codes[0::2] << 4 | codes[1::2]).T.contiguous()


def _round(columns: torch.Tensor, steps: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """E2M1 codes of columns (G, B, N) by steps (G, B/16, N) and factors (G, B, B)."""
    size = columns.shape[1]
    codes = torch.empty(columns.shape, dtype=torch.uint8, device=columns.device)
    errors = torch.zeros_like(columns)
    for end in range(size, 0, -_COLUMNS):
        begin = max(end - _COLUMNS, 0)
        pull = factor[:, end:, begin:end].mT @ errors[:, end:]
        values = torch.empty_like(pull)
        for j in range(end - 1, begin - 1, -1):
            near = (factor[:, None, j + 1 : end, j] @ errors[:, j + 1 : end])[:, 0]
            wanted = columns[:, j] + (pull[:, j - begin] + near) / factor[:, j, j, None]
            step = steps[:, j // BLOCK]
            value = round_e2m1(torch.where(step > 0, wanted / step, 0.0))
            values[:, j - begin] = value
            errors[:, j] = columns[:, j] - value * step
        codes[:, begin:end] = encode_e2m1(values)
    return codes
