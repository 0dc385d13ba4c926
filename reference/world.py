"""A procedural world of moving shapes: small enough to train on, plain enough to be scored without a judge.

A clip is 33 frames of 128x128 pixels at 8 frames a second: one object anywhere, or two side by side, in plain
colours over a plain background, with one motion. With s in [0, 1] the time over the clip, an object has

    centre(s) = centre + (s - 1/2) * travel,   radius(s) = r0 + s * (r1 - r0),   angle(s) = a0 + s * (a1 - a0)

Spinning is clockwise by 140 to 160 degrees: the mean of the two directions, which a model learns first, would
stand still.

A combination (objects, background, motion) whose hash falls into one residue of `HELD_OUT_EVERY` is never
trained on. Scenes are drawn as arrays (`SceneBatch`), so that tens of thousands cost seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from .captions import caption_of, names_sides

SIZE = 128
FRAMES = 33
FPS = 8
SHAPES = ("circle", "square", "triangle", "cross", "star", "ring")
COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (222, 36, 36),
    "orange": (248, 148, 24),
    "yellow": (248, 232, 48),
    "green": (36, 168, 64),
    "cyan": (48, 214, 226),
    "blue": (44, 76, 228),
    "purple": (142, 44, 190),
    "pink": (252, 112, 186),
}
BACKGROUNDS: dict[str, tuple[int, int, int]] = {
    "black": (12, 12, 12),
    "white": (244, 244, 244),
    "grey": (128, 128, 128),
    "navy": (16, 22, 74),
    "brown": (96, 60, 34),
    "beige": (214, 186, 140),
}
MOTIONS = ("left", "right", "up", "down", "still", "spinning", "growing", "shrinking")
PAIR_MOTIONS = (
    "still",
    "up",
    "down",
    "growing",
    "shrinking",
)  # left and right would cross, see `two objects`
SPINNING_SHAPES = ("square", "triangle", "cross", "star")  # turning a circle or a ring shows nothing
PAIR_SHARE = 0.12
HELD_OUT_EVERY = 10
SPLITS = ("train", "held-out", "all")
EXTENT = 1.2  # no shape reaches further than this many radii from its centre
_DIRECTIONS = {
    "left": (-1.0, 0.0),
    "right": (1.0, 0.0),
    "up": (0.0, -1.0),
    "down": (0.0, 1.0),
}  # y points down


@dataclass(frozen=True)
class Scene:
    """What one clip shows, in words.

    Attributes:
        objects: (colour, shape) of each object, from left to right.
        background: a name of `BACKGROUNDS`.
        motion: a name of `MOTIONS`, shared by all objects.
        caption: a sentence that names all of them.
        sides: whether there are two objects and the caption says which is on the left.
    """

    objects: tuple[tuple[str, str], ...]
    background: str
    motion: str
    caption: str
    sides: bool


@dataclass(frozen=True)
class SceneBatch:
    """N scenes as arrays: indices into the tables above, and the geometry.

    A single object's second place holds anything.

    Attributes:
        count: [N] int, 1 or 2 objects.
        shape, colour: [N, 2] int.
        background, motion: [N] int.
        wording: [N] int, which of a scene's captions is `Scene.caption`.
        centre: [N, 2, 2] float32, (x, y) in pixels at the middle of the clip.
        travel: [N, 2] float32, pixels from first to last frame.
        radius, angle: [N, 2, 2] float32, (object, first | last frame), pixels and radians.
    """

    count: np.ndarray
    shape: np.ndarray
    colour: np.ndarray
    background: np.ndarray
    motion: np.ndarray
    wording: np.ndarray
    centre: np.ndarray
    travel: np.ndarray
    radius: np.ndarray
    angle: np.ndarray

    def __len__(self) -> int:
        return len(self.count)

    def select(self, index: np.ndarray | slice) -> SceneBatch:
        """The scenes at `index`."""
        return SceneBatch(*(getattr(self, f.name)[index] for f in fields(self)))

    def words(self, i: int) -> tuple[tuple[tuple[str, str], ...], str, str]:
        """(objects, background, motion) of scene `i` by name."""
        colours, shapes = list(COLOURS), SHAPES
        objects = tuple(
            (colours[self.colour[i, k]], shapes[self.shape[i, k]]) for k in range(int(self.count[i]))
        )
        return objects, list(BACKGROUNDS)[self.background[i]], MOTIONS[self.motion[i]]

    def caption(self, i: int, wording: int | None = None) -> str:
        """A caption of scene `i`: its own, or the one numbered `wording`."""
        return caption_of(*self.words(i), int(self.wording[i]) if wording is None else wording)

    def scene(self, i: int) -> Scene:
        """Scene `i` in words."""
        sides = bool(self.count[i] == 2) and names_sides(int(self.wording[i]))
        return Scene(*self.words(i), self.caption(i), sides)


def sample_scenes(n: int, seed: int, split: str = "train", pair_share: float = PAIR_SHARE) -> SceneBatch:
    """Draw scenes; equal arguments give equal scenes.

    Args:
        n: how many.
        seed: of the draw.
        split: "train", "held-out" (combinations that "train" never holds) or "all".
        pair_share: share of the scenes with two objects.

    Raises:
        ValueError: for an unknown split, a negative n or a share outside [0, 1].
    """
    if not 0 <= pair_share <= 1:
        raise ValueError(f"sample_scenes needs a pair_share in [0, 1], got {pair_share}")
    if split not in SPLITS or n < 0:
        raise ValueError(f"sample_scenes needs n >= 0 and a split of {', '.join(SPLITS)}, got {n}, {split!r}")
    rng = np.random.default_rng(seed)
    parts: list[SceneBatch] = []
    while n > 0 or not parts:
        drawn = max(64, n * (HELD_OUT_EVERY + 2) if split == "held-out" else n + n // 4)
        scenes = _draw(drawn, rng, pair_share)
        if split != "all":
            scenes = scenes.select(is_held_out(scenes) == (split == "held-out"))
        parts.append(scenes.select(slice(0, n)))
        n -= len(parts[-1])
    return SceneBatch(*(np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(SceneBatch)))


def sample_prompts(n: int, seed: int, held_out: bool = True) -> list[Scene]:
    """`n` scenes in words, by default of combinations that were never trained on."""
    scenes = sample_scenes(n, seed, "held-out" if held_out else "train")
    return [scenes.scene(i) for i in range(n)]


def is_held_out(scenes: SceneBatch) -> np.ndarray:
    """[N] bool: which combinations (objects, background, motion) training must never see."""
    code = np.zeros(len(scenes), dtype=np.uint64)
    second = scenes.count == 2
    digits = [
        (scenes.count, 3),
        (scenes.shape[:, 0], len(SHAPES)),
        (scenes.colour[:, 0], len(COLOURS)),
        (np.where(second, scenes.shape[:, 1], 0), len(SHAPES)),
        (np.where(second, scenes.colour[:, 1], 0), len(COLOURS)),
        (scenes.background, len(BACKGROUNDS)),
        (scenes.motion, len(MOTIONS)),
    ]
    for digit, base in digits:
        code = code * np.uint64(base) + digit.astype(np.uint64)
    code = (code + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)  # wraps: a multiplicative hash
    code = (code ^ (code >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return (code >> np.uint64(40)) % np.uint64(HELD_OUT_EVERY) == 0


def _draw(n: int, rng: np.random.Generator, pair_share: float) -> SceneBatch:
    """`n` scenes of any split."""
    pair = rng.random(n) < pair_share
    single_motion = rng.integers(0, len(MOTIONS), n)
    pair_motion = np.array([MOTIONS.index(m) for m in PAIR_MOTIONS])[rng.integers(0, len(PAIR_MOTIONS), n)]
    motion = np.where(pair, pair_motion, single_motion)
    turning = np.array([SHAPES.index(s) for s in SPINNING_SHAPES])[
        rng.integers(0, len(SPINNING_SHAPES), (n, 2))
    ]
    spins = motion == MOTIONS.index("spinning")
    shape = np.where(spins[:, None], turning, rng.integers(0, len(SHAPES), (n, 2)))
    first = rng.integers(0, len(COLOURS), n)
    colour = np.stack([first, (first + rng.integers(1, len(COLOURS), n)) % len(COLOURS)], axis=1)
    radius = _radii(motion, pair, rng)
    centre, travel = _paths(motion, pair, EXTENT * radius.max(axis=2), rng)
    rng.integers(0, 2, n)  # once chose the direction; drawn on, so that equal seeds still give equal captions
    turn = np.where(spins, np.radians(rng.uniform(140, 160, n)), 0.0)
    start = np.radians(rng.uniform(-12, 12, (n, 2)))
    return SceneBatch(
        count=np.where(pair, 2, 1),
        shape=shape,
        colour=colour,
        background=rng.integers(0, len(BACKGROUNDS), n),
        motion=motion,
        wording=rng.integers(0, 1 << 20, n),
        centre=centre.astype(np.float32),
        travel=travel.astype(np.float32),
        radius=radius.astype(np.float32),
        angle=np.stack([start, start + turn[:, None]], axis=2).astype(np.float32),
    )


def _radii(motion: np.ndarray, pair: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """[n, object, first | last frame] radii in pixels."""
    n = len(motion)
    moves = motion < 4
    low = np.where(pair, np.where(moves, 16.0, 17.0), np.where(moves, 19.0, 20.0))
    high = np.where(pair, np.where(moves, 21.0, 22.0), np.where(moves, 25.0, 27.0))
    steady = low[:, None] + (high - low)[:, None] * rng.random((n, 2))
    small = np.where(pair[:, None], rng.uniform(12.5, 13.2, (n, 2)), rng.uniform(14.5, 17.0, (n, 2)))
    large = small * np.where(pair[:, None], rng.uniform(1.75, 1.8, (n, 2)), rng.uniform(1.75, 1.95, (n, 2)))
    radius = np.stack([steady, steady], axis=2)
    radius[motion == MOTIONS.index("growing")] = np.stack([small, large], axis=2)[
        motion == MOTIONS.index("growing")
    ]
    shrinks = motion == MOTIONS.index("shrinking")
    radius[shrinks] = np.stack([large, small], axis=2)[shrinks]
    return radius


def _paths(
    motion: np.ndarray, pair: np.ndarray, extent: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Centres [n, object, 2] and travels [n, 2], so that every object stays inside the frame, or its half."""
    n = len(motion)
    margin = 3.0
    directions = np.array([_DIRECTIONS.get(m, (0.0, 0.0)) for m in MOTIONS])[motion]
    furthest = np.minimum(62.0, SIZE - 2 * margin - 2 * extent.max(axis=1))
    travel = directions * (44 + (furthest - 44) * rng.random(n))[:, None]
    middle = np.full((n, 2, 2), SIZE / 2)
    middle[pair, 0, 0], middle[pair, 1, 0] = SIZE / 4, 3 * SIZE / 4
    room = np.full((n, 2, 2), SIZE / 2)
    room[pair, :, 0] = SIZE / 4
    room = np.clip(room - margin - extent[:, :, None] - np.abs(travel)[:, None, :] / 2, 0.0, 24.0)
    return middle + room * rng.uniform(-1, 1, (n, 2, 2)), travel
