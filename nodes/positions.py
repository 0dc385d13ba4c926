"""Positions of CogVideoX's video tokens, as the weights were trained with them.

Rotary (Su et al., arXiv 2104.09864) in three axes, head_dim = d/4 (time) + 3d/8 (height) + 3d/8 (width):

    angle[p, 2i] = angle[p, 2i+1] = p * 10000^(-2i/dim)

1.0 stretches a grid of any size over the crop of the trained one; 1.5 counts 0, 1, 2, ...
Sincos (the 2B), width = D/4 (time) + 3D/8 (width) + 3D/8 (height), each [sin | cos]:

    angle[p, i] = p / scale * 10000^(-2i/dim)

Source: diffusers' CogVideoX pipeline, whose numbers these are held to by test.
"""

import torch

Grid = tuple[int, int, int]  # patches in time, height, width
Table = tuple[torch.Tensor, torch.Tensor]
_BASE = 10000.0


def crop_region(grid: tuple[int, int], base: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Where a grid (height, width) lies on the base grid, scaled to fit and centred: (first, end) by axis."""
    scale = min(base[0] / grid[0], base[1] / grid[1])
    region = []
    for axis in (0, 1):
        fills = scale == base[axis] / grid[axis]
        side = base[axis] if fills else round(scale * grid[axis])
        first = round((base[axis] - side) / 2)
        region.append((first, first + side))
    return region[0], region[1]


def rotary_table(grid: Grid, head_dim: int, base: tuple[int, int] | None, device: torch.device) -> Table:
    """Cosines and sines for every video token.

    Args:
        grid: patches in time, height and width.
        head_dim: channels of an attention head, a multiple of 16.
        base: (height, width) in patches of the size the model was trained at; None counts patches (1.5).

    Returns:
        cos, sin: (time * height * width, head_dim) float32.
    """
    places = [torch.arange(count, dtype=torch.float32, device=device) for count in grid]
    if base is not None:
        for axis, (first, end) in enumerate(crop_region(grid[1:], base), start=1):
            count = grid[axis]
            last = end * (count - 1) / count
            places[axis] = torch.linspace(first, last, count, dtype=torch.float32, device=device)
    dims = (head_dim // 4, head_dim // 8 * 3, head_dim // 8 * 3)
    angles = []
    for axis, (place, dim) in enumerate(zip(places, dims, strict=True)):
        steps = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
        angle = torch.outer(place, 1.0 / _BASE**steps).repeat_interleave(2, dim=1)
        angles.append(_spread(angle, grid, axis))
    joint = torch.cat(angles, dim=-1).flatten(0, 2)
    return joint.cos(), joint.sin()


def sincos_table(
    grid: Grid, width: int, spatial_scale: float, temporal_scale: float, device: torch.device
) -> torch.Tensor:
    """What is added to every video token: (time * height * width, width) float32."""
    time, height, across = grid
    parts = (
        _spread(_sincos(time, width // 4, temporal_scale, device), grid, 0),
        _spread(_sincos(across, width // 8 * 3, spatial_scale, device), grid, 2),
        _spread(_sincos(height, width // 8 * 3, spatial_scale, device), grid, 1),
    )
    return torch.cat(parts, dim=-1).flatten(0, 2)


def _sincos(count: int, dim: int, scale: float, device: torch.device) -> torch.Tensor:
    places = (torch.arange(count, dtype=torch.float32) / scale).double()
    steps = torch.arange(dim // 2, dtype=torch.float64) / (dim / 2)
    angle = torch.outer(places, 1.0 / _BASE**steps)
    return torch.cat([angle.sin(), angle.cos()], dim=1).float().to(device)


def _spread(table: torch.Tensor, grid: Grid, axis: int) -> torch.Tensor:
    """A table (grid[axis], dim) repeated over the whole grid: (time, height, width, dim)."""
    shape = [1, 1, 1, table.shape[1]]
    shape[axis] = grid[axis]
    return table.view(shape).expand(*grid, -1)
