"""Reads a clip of the procedural world back into words: plain image processing, no network.

Background: median colour of the frame's border. Cover of an object: a = <p - b, c - b> / |c - b|^2 of each
pixel p, with b the background and c the object's median colour. Shape: the cover, scaled to unit area about
its centroid, against the world's own drawings at all angles, by sum(min) / sum(max). Motion: travel of the
centroid, ratio of the radii and turn of the outline's k-fold moment, each over the size it has in the world;
the largest wins.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from .render import DISTANCES, EDGE
from .world import BACKGROUNDS, COLOURS, SHAPES, Scene

KINDS = ("background", "colour", "shape", "motion")
SIDE = 28  # of a normalised cover
REACH = 2.2  # of a normalised cover, in radii of the disc of equal area
ANGLES = 24
DIFFERENT = 55.0  # RGB distance from the background from which a pixel belongs to an object
MIN_AREA = 60.0  # pixels; less is no object
FOLDS = {"square": 4, "triangle": 3, "cross": 4, "star": 5}  # symmetry of the shapes that may spin
FULL_TRAVEL, FULL_RATIO, FULL_TURN = (
    44.0,
    np.log(1.75),
    np.radians(130),
)  # the least that a moving scene shows
NOTICED = 0.45  # share of the above from which a motion counts


@dataclass(frozen=True)
class Reading:
    """What a clip shows. Objects from left to right as (colour, shape); motion "none" without objects."""

    background: str
    objects: tuple[tuple[str, str], ...]
    motion: str

    def words(self) -> str:
        """One line for people."""
        objects = " and ".join(" ".join(thing) for thing in self.objects) or "nothing"
        return f"{objects}, {self.motion}, on {self.background}"


def read_clip(frames: np.ndarray) -> Reading:
    """Read one clip.

    Args:
        frames: [T, H, W, 3] uint8.

    Raises:
        ValueError: for another shape or dtype.
    """
    if frames.ndim != 4 or frames.shape[-1] != 3 or frames.dtype != np.uint8:
        raise ValueError(f"read_clip needs frames [T, H, W, 3] uint8, got {frames.shape} {frames.dtype}")
    pixels = frames.astype(np.float32)
    border = np.concatenate(
        [part.reshape(-1, 3) for part in (pixels[:, :3], pixels[:, -3:], pixels[:, :, :3], pixels[:, :, -3:])]
    )
    ground = np.median(border, axis=0)
    background = _nearest(ground, BACKGROUNDS)
    different = np.linalg.norm(pixels - ground, axis=-1) > DIFFERENT
    objects: list[tuple[str, str]] = []
    motions: list[str] = []
    for columns in _object_columns(different):
        inside = different & columns
        if inside.sum() < MIN_AREA * len(frames) / 4:
            continue
        colour = _object_colour(pixels, inside)
        direction = colour - ground
        cover = np.clip((pixels - ground) @ direction / (direction @ direction), 0, 1) * _widen(inside)
        shape, motion = _read_object(np.where(cover > 0.25, cover, 0.0))
        objects.append((_nearest(colour, COLOURS), shape))
        motions.append(motion)
    motion = motions[0] if len(set(motions)) == 1 else "mixed" if motions else "none"
    return Reading(background, tuple(objects), motion)


def score(scene: Scene, reading: Reading) -> dict[str, bool]:
    """kind -> whether it is right; with two objects, whether both are.

    Two objects are compared from left to right where the caption names the sides. Where it does not, they may
    stand either way round, but colour and shape are compared the same way round: the one with more colours
    right, then more shapes.
    """
    orders = [scene.objects] if scene.sides else [scene.objects, scene.objects[::-1]]
    colour, shape = max(_matches(order, reading.objects) for order in orders)
    everything = max(len(scene.objects), len(reading.objects))
    return {
        "background": scene.background == reading.background,
        "colour": colour == everything,
        "shape": shape == everything,
        "motion": scene.motion == reading.motion,
    }


def _matches(asked: tuple[tuple[str, str], ...], seen: tuple[tuple[str, str], ...]) -> tuple[int, int]:
    """How many colours and how many shapes agree, place by place."""
    pairs = list(zip(asked, seen, strict=False))
    return sum(a[0] == b[0] for a, b in pairs), sum(a[1] == b[1] for a, b in pairs)


def prepare() -> None:
    """Draw the templates now, so that processes forked later share them."""
    _templates()


def _nearest(colour: np.ndarray, names: dict[str, tuple[int, int, int]]) -> str:
    return min(names, key=lambda name: float(np.square(colour - np.array(names[name])).sum()))


def _object_columns(different: np.ndarray) -> list[np.ndarray]:
    """[W] bool masks, one per object: split at an empty gap near the middle with objects on both sides."""
    width = different.shape[2]
    profile = different.sum(axis=(0, 1)) / len(different)
    low, high = width * 5 // 16, width * 11 // 16
    gap = low + int(np.argmin(np.convolve(profile, np.ones(3) / 3, "same")[low:high]))
    share = profile[:gap].sum() / max(profile.sum(), 1e-6)
    columns = np.arange(width)
    if profile[gap - 1 : gap + 2].mean() < 0.6 and 0.15 < share < 0.85:
        return [columns < gap, columns >= gap]
    return [columns >= 0]


def _object_colour(pixels: np.ndarray, inside: np.ndarray) -> np.ndarray:
    """Median colour of the pixels whose neighbours all belong to the object, or of all of them."""
    core = inside.copy()
    for axis in (1, 2):
        core &= np.roll(inside, 1, axis) & np.roll(inside, -1, axis)
    return np.median(pixels[core if core.sum() > 50 else inside], axis=0)


def _widen(inside: np.ndarray) -> np.ndarray:
    """`inside` and its neighbours, so that faded outlines count and far noise does not."""
    wide = inside.copy()
    for axis in (1, 2):
        wide |= np.roll(wide, 1, axis) | np.roll(wide, -1, axis)
    return wide


def _read_object(cover: np.ndarray) -> tuple[str, str]:
    """(shape, motion) of one object from its cover [T, H, W]."""
    area = cover.sum(axis=(1, 2))
    seen = np.flatnonzero(area > MIN_AREA)
    if len(seen) < 8:
        return "none", "none"
    cover, area = cover[seen], area[seen]
    xs, ys = np.arange(cover.shape[2]), np.arange(cover.shape[1])
    cx = (cover.sum(axis=1) * xs).sum(axis=1) / area
    cy = (cover.sum(axis=2) * ys).sum(axis=1) / area
    radius = np.sqrt(area / np.pi)
    chosen = np.argsort(-area, kind="stable")[:: max(1, len(area) // 12)]
    unit = _unit_covers(cover[chosen], cx[chosen], cy[chosen], radius[chosen])
    shape = _nearest_shape(unit, radius[chosen])
    return shape, _motion(shape, cover, cx, cy, radius)


def _unit_covers(cover: np.ndarray, cx: np.ndarray, cy: np.ndarray, radius: np.ndarray) -> np.ndarray:
    """[F, SIDE * SIDE]: covers scaled about their centroids until discs of their areas have radius 1."""
    u = (np.arange(SIDE) + 0.5) / SIDE * 2 * REACH - REACH
    x, y = cx[:, None] + radius[:, None] * u, cy[:, None] + radius[:, None] * u
    x0, y0 = np.floor(x).astype(int), np.floor(y).astype(int)
    fx, fy = (x - x0)[:, None, :], (y - y0)[:, :, None]
    height, width = cover.shape[1:]
    frame = np.arange(len(cover))[:, None, None]

    def at(dy: int, dx: int) -> np.ndarray:
        yy, xx = (y0 + dy)[:, :, None], (x0 + dx)[:, None, :]
        valid = (yy >= 0) & (yy < height) & (xx >= 0) & (xx < width)
        return cover[frame, yy.clip(0, height - 1), xx.clip(0, width - 1)] * valid

    top = at(0, 0) * (1 - fx) + at(0, 1) * fx
    bottom = at(1, 0) * (1 - fx) + at(1, 1) * fx
    return (top * (1 - fy) + bottom * fy).reshape(len(cover), -1)


@lru_cache(maxsize=1)
def _templates() -> np.ndarray:
    """[shapes, ANGLES, SIDE * SIDE] float32: the world's drawings, normalised like `_unit_covers`."""
    size, r = 128, 22.0
    pixel = torch.arange(size, dtype=torch.float32) + 0.5 - size / 2
    result = []
    for name in SHAPES:
        turns = torch.arange(ANGLES) * (2 * torch.pi / FOLDS.get(name, 1) / ANGLES)
        cos, sin = torch.cos(turns)[:, None, None], torch.sin(turns)[:, None, None]
        x = cos * pixel[None, None, :] + sin * pixel[None, :, None]
        y = cos * pixel[None, :, None] - sin * pixel[None, None, :]
        cover = (0.5 - DISTANCES[name](x, y, torch.tensor(r)) / EDGE).clamp(0, 1).numpy()
        area = cover.sum(axis=(1, 2))
        middle = np.full(ANGLES, size / 2 - 0.5)
        result.append(_unit_covers(cover, middle, middle, np.sqrt(area / np.pi)))
    return np.stack(result).astype(np.float32)


def _nearest_shape(unit: np.ndarray, radius: np.ndarray) -> str:
    """The shape whose best angle overlaps most, over frames weighted by their radius."""
    templates = _templates().reshape(-1, SIDE * SIDE)
    overlap = np.stack(
        [np.minimum(templates, u).sum(axis=1) / np.maximum(templates, u).sum(axis=1) for u in unit]
    )
    best = overlap.reshape(len(unit), len(SHAPES), ANGLES).max(axis=2)
    return SHAPES[int(np.argmax(radius @ best))]


def _motion(shape: str, cover: np.ndarray, cx: np.ndarray, cy: np.ndarray, radius: np.ndarray) -> str:
    """The motion whose size, over the size it has in the world, is largest; "still" below `NOTICED`."""
    ends = max(1, len(cx) // 11)
    dx, dy = (float(c[-ends:].mean() - c[:ends].mean()) for c in (cx, cy))
    ratio = float(np.log(radius[-ends:].mean() / radius[:ends].mean()))
    strength = {
        "right" if dx > 0 else "left": abs(dx) / FULL_TRAVEL,
        "down" if dy > 0 else "up": abs(dy) / FULL_TRAVEL,
        "growing" if ratio > 0 else "shrinking": abs(ratio) / FULL_RATIO,
        "spinning": abs(_turn(FOLDS[shape], cover, cx, cy, radius)) / FULL_TURN if shape in FOLDS else 0.0,
    }
    best = max(strength, key=lambda name: strength[name])
    return best if strength[best] > NOTICED else "still"


def _turn(folds: int, cover: np.ndarray, cx: np.ndarray, cy: np.ndarray, radius: np.ndarray) -> float:
    """Radians that the outline turns over the clip, from the phase of its `folds`-fold moment."""
    y, x = np.mgrid[: cover.shape[1], : cover.shape[2]]
    z = ((x - cx[:, None, None]) + 1j * (y - cy[:, None, None])) / radius[:, None, None]
    rho = np.abs(z)
    weight = cover * ((rho > 0.5) & (rho < 1.8))
    moment = (weight * z**folds / np.maximum(rho, 1e-6) ** (folds - 2)).sum(axis=(1, 2))
    return float(np.ptp(np.unwrap(np.angle(moment))) / folds)
