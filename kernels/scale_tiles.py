"""The order in which cuBLAS, and files, keep the block scales of NVFP4: tiles of 128 rows and 4 columns.

    place(r, c) = 16 (r % 32) + 4 (r // 32) + c        within a tile, 512 bytes, tiles one after the other

The layout is NVIDIA's (cuBLAS, block scaling factors of 16-element blocks). Both sides are padded with zeros.
"""

from __future__ import annotations

import torch

from .checks import describe


def tile_scales(scale: torch.Tensor) -> torch.Tensor:
    """Reorder block scales to the 128x4 tiles of cuBLAS, padded with zeros.

    Args:
        scale: (N, C) of a one-byte type.

    Returns:
        (N rounded up to 128, C rounded up to 4), same type: the tiles one after the other.

    Raises:
        ValueError: if `scale` is not 2-D of a one-byte type.
    """
    _check_scales("tile_scales", scale)
    rows, columns = scale.shape
    tall, wide = _padded(rows, columns)
    padded = torch.zeros(tall, wide, dtype=torch.uint8, device=scale.device)
    padded[:rows, :columns] = scale.view(torch.uint8)
    tiles = padded.view(tall // 128, 4, 32, wide // 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(tall, wide).view(scale.dtype)


def untile_scales(tiled: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Undo `tile_scales`.

    Args:
        tiled: (rows rounded up to 128, columns rounded up to 4) of a one-byte type.
        rows, columns: shape without the padding.

    Returns:
        (rows, columns), same type.

    Raises:
        ValueError: if `tiled` has another shape or type.
    """
    _check_scales("untile_scales", tiled)
    tall, wide = _padded(rows, columns)
    if tiled.shape != (tall, wide):
        raise ValueError(
            f"untile_scales needs {(tall, wide)} for {rows} x {columns} scales, got {describe(tiled)}"
        )
    tiles = tiled.contiguous().view(torch.uint8).view(tall // 128, wide // 4, 32, 4, 4)
    plain = tiles.permute(0, 3, 2, 1, 4).reshape(tall, wide)
    return plain[:rows, :columns].contiguous().view(tiled.dtype)


def _padded(rows: int, columns: int) -> tuple[int, int]:
    return -(-rows // 128) * 128, -(-columns // 4) * 4


def _check_scales(name: str, scale: torch.Tensor) -> None:
    if scale.ndim != 2 or scale.element_size() != 1:
        raise ValueError(f"{name} needs a 2-D tensor of a one-byte type, got {describe(scale)}")
