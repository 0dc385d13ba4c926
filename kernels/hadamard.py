"""Block Hadamard rotation along K, alone and fused with quantization.

    y[..., b*n : (b+1)*n] = x[..., b*n : (b+1)*n] @ H / sqrt(n),     H[i, j] = (-1)^popcount(i & j)

H / sqrt(n) is orthonormal and symmetric, hence its own inverse: rotating both operands of a product along
their shared axis leaves the product as it is, and spreads an outlier over its block before it is quantized
(QuaRot; 6Bit-Diffusion, arXiv 2603.18742). Everything is computed in float32.
"""

from __future__ import annotations

import torch

from .checks import LARGEST_HADAMARD, check_block, check_float, check_nvfp4_columns
from .dispatch import Op
from .int8 import quantize_rows
from .nvfp4 import quantize_nvfp4


def hadamard_block_size(columns: int) -> int:
    """The largest power of two that divides `columns`, at most 128.

    Raises:
        ValueError: if `columns` is not positive.
    """
    if columns <= 0:
        raise ValueError(f"hadamard_block_size needs a positive K, got {columns}")
    return min(columns & -columns, LARGEST_HADAMARD)


@Op
def block_hadamard(x: torch.Tensor, block: int) -> torch.Tensor:
    """Rotate the last axis of `x` in blocks.

    Args:
        x: (..., K) float16, bfloat16 or float32, any strides.
        block: a power of two, at most 128, that divides K; 0 or 1 leaves `x` as it is.

    Returns:
        Same shape and dtype, a new tensor.

    Raises:
        ValueError: wrong type, or a block that cannot tile K.
    """
    check_float("block_hadamard", x, ndim=None)
    check_block("block_hadamard", x.shape[-1], block)
    return _rotate(x.float(), block).to(x.dtype) if block > 1 else x.clone()


@Op
def hadamard_quantize_int8(x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate each row of `x` in float32 and quantize it to INT8, without rounding in between.

    What is quantized are the sums x H; 1 / sqrt(block) goes into the scale.

    Args:
        x: (M, K) float16, bfloat16 or float32.
        block: a power of two, at most 128, that divides K; 0 or 1 means no rotation.

    Returns:
        q: (M, K) int8.
        scale: (M, 1) float32, as `quantize_int8`.

    Raises:
        ValueError: wrong type or rank, or a block that cannot tile K.
    """
    check_float("hadamard_quantize_int8", x, ndim=2)
    check_block("hadamard_quantize_int8", x.shape[1], block)
    return quantize_rows(_sums(x.float(), block), max(block, 1) ** -0.5)


@Op
def hadamard_quantize_nvfp4(x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rotate each row of `x` in float32 and quantize it to NVFP4 with one global scale per row.

    Args:
        x: (M, K) float16, bfloat16 or float32, K a multiple of 16.
        block: a power of two, at most 128, that divides K; 0 or 1 means no rotation.

    Returns:
        data (M, K/2) uint8, scale (M, K/16) float8_e4m3fn, global_scale (M, 1) float32, as `quantize_nvfp4`
        with rounding "nearest".

    Raises:
        ValueError: wrong type, rank or K, or a block that cannot tile K.
    """
    check_float("hadamard_quantize_nvfp4", x, ndim=2)
    check_nvfp4_columns("hadamard_quantize_nvfp4", x.shape[1])
    check_block("hadamard_quantize_nvfp4", x.shape[1], block)
    return quantize_nvfp4(_rotate(x.float(), block), per_row=True)


def hadamard_signs(block: int, device: torch.device) -> torch.Tensor:
    """H without its factor: (block, block) float32 of 1 and -1."""
    index = torch.arange(block, device=device)
    parity = index[:, None] & index[None, :]
    shift = 1
    while shift < block:
        parity = parity ^ (parity >> shift)
        shift *= 2
    return (1 - 2 * (parity & 1)).float()


def _rotate(x: torch.Tensor, block: int) -> torch.Tensor:
    """float32 in, float32 out."""
    return _sums(x, block) * block**-0.5 if block > 1 else x


def _sums(x: torch.Tensor, block: int) -> torch.Tensor:
    """`_rotate` without its factor: x H."""
    return (x.reshape(-1, block) @ hadamard_signs(block, x.device)).view(x.shape) if block > 1 else x
