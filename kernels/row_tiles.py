"""How the passes over whole rows (`rows_triton`) cut them up: tables by compute capability."""

from dataclasses import dataclass, replace
from functools import cache

import torch

COLUMNS = 128  # of a chunk: the largest rotation
PLAIN, GELU, NORM = 0, 1, 2  # what is done to a row first


@dataclass(frozen=True)
class RowTile:
    """How rows are cut up: `rows` of `parts` times `chunks` a tile. `stages` are tiles on their way at a time
    in shared memory, or one is `ahead` in registers; `programs` run on each multiprocessor."""

    rows: int
    parts: int
    chunks: int
    warps: int
    stages: int
    programs: int
    ahead: bool

    @property
    def group(self) -> int:
        """Chunks that all threads hold at a time, four a warp; a multiple of the rows, at most all chunks."""
        return min(max(4 * self.warps, self.rows), self.rows * self.chunks)


# (chunks of a tile, warps, stages, programs) by major compute capability. One stage: the next tile comes
# straight into registers, since in shared memory the coefficients of rows that are normalized would come too.
LAUNCH = {9: {PLAIN: (128, 4, 2, 4), GELU: (128, 4, 3, 2), NORM: (64, 4, 1, 6)}}
MEASURED = {9: {**LAUNCH[9], GELU: (128, 4, 2, 2)}}  # where outliers are measured: sums take registers
# The same of a part, for rows in three parts, where that is faster: by what is done first, measured or not.
THIRDS = {9: {(PLAIN, False): (32, 4, 3, 2), (GELU, True): (32, 4, 3, 2)}}
OTHER_PROGRAMS = (1, 2, 3, 4, 6)  # timed beside the table's on other GPUs; anything else would change sums
SMALL_LAUNCH = {PLAIN: (64, 8, 2, 2), GELU: (128, 8, 1, 2), NORM: (128, 8, 1, 2)}


@cache
def row_tiles(
    width: int,
    dtype: torch.dtype,
    prologue: int,
    capability: tuple[int, int],
    block: int,
    outliers: bool = False,
) -> tuple[RowTile, ...]:
    """Tiles that may be timed, the table's first; it alone where it was measured.

    They differ in the number of programs, which decides who computes a row, not how.
    """
    tile = row_tile(width, dtype, prologue, capability, block, outliers)
    if capability[0] in LAUNCH:
        return (tile,)
    return (tile, *(replace(tile, programs=n) for n in OTHER_PROGRAMS if n != tile.programs))


def row_tile(
    width: int,
    dtype: torch.dtype,
    prologue: int,
    capability: tuple[int, int],
    block: int,
    outliers: bool = False,
) -> RowTile:
    """How rows of `width` values, rotated in blocks of `block`, are cut up on GPUs of this capability."""
    table = MEASURED if outliers else LAUNCH
    least, warps, stages, programs = table.get(capability[0], SMALL_LAUNCH)[prologue]
    chunks = padded_width(width) // COLUMNS
    if dtype == torch.float32:  # sums and differences instead of a product take more registers
        return RowTile(max(1, 64 // chunks), 1, chunks, warps=16, stages=1, programs=1, ahead=False)
    third = THIRDS.get(capability[0], {}).get((prologue, outliers))
    if third and block > 1 and chunks >= 4 and 4 * width == 3 * chunks * COLUMNS:
        least, warps, stages, programs = third
        rows = max(1, least // (chunks // 4))
        return RowTile(rows, 3, chunks // 4, warps, stages, programs, ahead=False)
    rows = max(1, least // chunks)
    if prologue == PLAIN and block <= 1:  # without a product, values stay as they were loaded: more registers
        warps *= 2
    warps = min(16, warps * (rows * chunks // least))
    return RowTile(rows, 1, chunks, warps, stages, programs, ahead=stages == 1)


def padded_width(width: int) -> int:
    """Columns of a row as tiles hold it."""
    return COLUMNS << (-(-width // COLUMNS) - 1).bit_length()
