"""Stage `evaluator`: how often the evaluator reads rendered clips right, and finds wrong ones right.

Clean clips; the same clips blurred and noisy; and the readings of the clean clips held against the next
clip's scene, which must come near chance.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional

from .evaluator import Reading
from .render import render
from .sample import accuracy, read_all
from .world import Scene, sample_scenes

BLUR = (0.06, 0.24, 0.4, 0.24, 0.06)  # along rows and columns: about one pixel
NOISE = 8.0  # standard deviation, of 255
SEED = 4321


def degrade(clips: np.ndarray, seed: int = SEED) -> np.ndarray:
    """[N, T, H, W, 3] uint8 clips, blurred and noisy."""
    kernel = torch.tensor(BLUR)
    kernel = (kernel[:, None] * kernel).expand(3, 1, -1, -1)
    generator = torch.Generator().manual_seed(seed)
    result = np.empty_like(clips)
    for i, clip in enumerate(clips):
        x = functional.pad(torch.from_numpy(clip).permute(0, 3, 1, 2).float(), (2, 2, 2, 2), "replicate")
        x = functional.conv2d(x, kernel, groups=3)
        x = x + NOISE * torch.randn(x.shape, generator=generator)
        result[i] = x.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).numpy()
    return result


def check_evaluator(clips: int, seed: int = SEED) -> dict[str, dict[str, tuple[int, int, float, float]]]:
    """Read `clips` rendered clips of any split.

    Returns:
        "clean", "blurred", "another clip's" -> kind -> (right, of, 95 % low, high).

    Raises:
        ValueError: for fewer than two clips.
    """
    if clips < 2:
        raise ValueError(f"check_evaluator needs 2 clips or more, got {clips}")
    batch = sample_scenes(clips, seed, "all")
    scenes = [batch.scene(i) for i in range(clips)]
    readings: dict[str, list[Reading]] = {"clean": [], "blurred": []}
    for start in range(0, clips, 50):
        frames = render(batch.select(slice(start, start + 50))).numpy()
        readings["clean"] += read_all(frames)
        readings["blurred"] += read_all(degrade(frames, seed + start))
    asked: dict[str, list[Scene]] = {"clean": scenes, "blurred": scenes}
    asked["another clip's"], readings["another clip's"] = scenes[1:] + scenes[:1], readings["clean"]
    return {name: accuracy(asked[name], readings[name])["all"] for name in readings}


def print_check(clips: int) -> None:
    """`check_evaluator`, one line a group and kind."""
    for name, shares in check_evaluator(clips).items():
        for kind, (right, n, low, high) in shares.items():
            print(f"{name:14} {kind:10} {right}/{n} = {right / n:.3f} [{low:.3f}, {high:.3f}]", flush=True)
