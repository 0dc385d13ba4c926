"""Draws scenes of the procedural world from signed distances, on any device.

    coverage(p) = clamp(1/2 - d(p) / 1.5, 0, 1),   pixel = background + coverage * (colour - background)

with d the signed distance, in pixels, of a pixel's centre to the outline (negative inside).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch

from .world import BACKGROUNDS, COLOURS, FRAMES, SHAPES, SIZE, SceneBatch

EDGE = 1.5  # pixels over which an outline fades
Distance = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def render(
    scenes: SceneBatch,
    device: torch.device | str = "cpu",
    frames: np.ndarray | None = None,
    origin: np.ndarray | None = None,
    size: int = SIZE,
) -> torch.Tensor:
    """Draw clips, or windows of clips.

    Args:
        scenes: B scenes.
        device: where to draw.
        frames: [B, T] frame numbers to draw; all 33 when None.
        origin: [B, 2] (x, y) of the window's upper left pixel; 0 when None.
        size: side of the window.

    Returns:
        [B, T, size, size, 3] uint8.
    """
    batch = len(scenes)
    frames = np.broadcast_to(np.arange(FRAMES), (batch, FRAMES)) if frames is None else frames
    origin = np.zeros((batch, 2)) if origin is None else origin
    time = frames.astype(np.float32) / (FRAMES - 1)
    paint = torch.tensor(list(COLOURS.values()), dtype=torch.float32)
    ground = torch.tensor(list(BACKGROUNDS.values()), dtype=torch.float32)[
        torch.from_numpy(scenes.background)
    ]
    canvas = (
        ground.to(device)[:, None, None, None, :].expand(-1, frames.shape[1], size, size, -1).contiguous()
    )
    for number, name in enumerate(SHAPES):
        for k in (0, 1):
            chosen = np.flatnonzero((scenes.shape[:, k] == number) & (scenes.count > k))
            if not len(chosen):
                continue
            cover = _coverage(scenes, chosen, k, time[chosen], origin[chosen], size, DISTANCES[name], device)
            index = torch.from_numpy(chosen).to(device)
            colour = paint[torch.from_numpy(scenes.colour[chosen, k])].to(device)[:, None, None, None, :]
            part = canvas[index]
            canvas[index] = part + cover[..., None] * (colour - part)
    return canvas.round_().to(torch.uint8)


def _coverage(
    scenes: SceneBatch,
    chosen: np.ndarray,
    k: int,
    time: np.ndarray,
    origin: np.ndarray,
    size: int,
    distance: Distance,
    device: torch.device | str,
) -> torch.Tensor:
    """[b, T, size, size] float32 share of each pixel that object `k` covers."""
    centre = scenes.centre[chosen, k, None] + (time[..., None] - 0.5) * scenes.travel[chosen, None]
    centre = centre - origin[:, None]
    radius = scenes.radius[chosen, k, :1] + time * np.diff(scenes.radius[chosen, k], axis=1)
    angle = scenes.angle[chosen, k, :1] + time * np.diff(scenes.angle[chosen, k], axis=1)
    values = np.stack([centre[..., 0], centre[..., 1], radius, np.cos(angle), np.sin(angle)])
    packed = torch.from_numpy(values.astype(np.float32)).to(device)[..., None, None]
    cx, cy, radius_t, cos, sin = packed
    pixel = torch.arange(size, device=device, dtype=torch.float32) + 0.5
    dx, dy = pixel[None, :] - cx, pixel[:, None] - cy
    return (0.5 - distance(cos * dx + sin * dy, cos * dy - sin * dx, radius_t) / EDGE).clamp_(0, 1)


def _circle(x: torch.Tensor, y: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    return torch.sqrt(x * x + y * y) - r


def _square(x: torch.Tensor, y: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    return torch.maximum(x.abs(), y.abs()) - 0.84 * r


def _triangle(x: torch.Tensor, y: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    return (
        torch.maximum(y, math.sqrt(0.75) * x.abs() - 0.5 * y) - 0.6 * r
    )  # circumradius 1.2 r, one corner up


def _cross(x: torch.Tensor, y: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    x, y = x.abs(), y.abs()
    upright = torch.maximum(x - 0.36 * r, y - 1.05 * r)
    return torch.minimum(upright, torch.maximum(y - 0.36 * r, x - 1.05 * r))


def _star(x: torch.Tensor, y: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    outer, inner, half = 1.2, 0.56, math.pi / 5
    theta = (
        torch.remainder(torch.atan2(x, -y) + half, 2 * half) - half
    ).abs()  # 0 at a point, half at a notch
    rho = torch.sqrt(x * x + y * y)
    ex, ey = inner * math.cos(half) - outer, inner * math.sin(half)  # the edge from point to notch
    length = math.hypot(ex, ey)
    return ((rho * torch.cos(theta) - outer * r) * ey - rho * torch.sin(theta) * ex) / length


def _ring(x: torch.Tensor, y: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    return (torch.sqrt(x * x + y * y) - 0.82 * r).abs() - 0.25 * r


DISTANCES: dict[str, Distance] = {
    "circle": _circle,
    "square": _square,
    "triangle": _triangle,
    "cross": _cross,
    "star": _star,
    "ring": _ring,
}
