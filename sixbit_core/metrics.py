"""How close two clips are.

PSNR = 10 log10(255^2 / mean (a - b)^2), over every pixel and channel of every frame
SSIM as in Wang, Bovik, Sheikh, Simoncelli 2004: Gaussian window 11x11, sigma 1.5,
       K1 = 0.01, K2 = 0.03, range 255, windows that lie inside the frame, mean over channels and frames
flicker = mean |e(t + 1) - e(t)| of the error e = a - b, from frame to frame, in levels of 255: what moves in
       both clips does not count
composition = correlation of luma (0.299 R + 0.587 G + 0.114 B), averaged over cells of 1/16 of the frame's
       shorter side, each frame less its own mean, over all cells and frames: where light and dark lie,
       without detail and brightness

`COMPOSITION_HELD` was chosen by eye on a few clips of the bundled reference: drafts of 20 steps, preset fast,
against 50, balanced, of the same seed and of another. `python benchmarks/composition.py` measures how well it
tells them apart.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

WINDOW, SIGMA = 11, 1.5
C1, C2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
CELLS = 16  # along the shorter side of a frame
LUMA = (0.299, 0.587, 0.114)
COMPOSITION_HELD = 0.9
IDENTICAL_DB = 100.0  # reported for equal clips, whose PSNR has no upper end

OnFrame = Callable[[int, int], None]  # (frames done, frames in all)


def psnr(a: torch.Tensor, b: torch.Tensor) -> float:
    """PSNR in dB of two uint8 clips of the same shape; 100 for equal ones.

    Raises:
        ValueError: if the clips are not both uint8 of one shape.
    """
    _check(a, b)
    frames = zip(a, b, strict=True)  # float32 holds each error and its square as they are
    total = sum((x.float() - y.float()).square().sum(dtype=torch.float64).item() for x, y in frames)
    error = total / a.numel()
    return IDENTICAL_DB if error == 0 else min(IDENTICAL_DB, 10 * math.log10(255**2 / error))


def ssim(a: torch.Tensor, b: torch.Tensor, on_frame: OnFrame | None = None) -> float:
    """Mean SSIM of two clips, in float32.

    Args:
        a, b: (T, H, W, C) uint8, H and W at least 11.
        on_frame: called after every frame; what it raises ends the work.

    Raises:
        ValueError: if the clips are not both uint8 of one 4-D shape, or are smaller than the window.
    """
    _check(a, b)
    if a.ndim != 4 or min(a.shape[1:3]) < WINDOW:
        raise ValueError(f"ssim needs (T, H, W, C) clips of at least {WINDOW}x{WINDOW}, got {tuple(a.shape)}")
    at = torch.arange(WINDOW, dtype=torch.float64) - WINDOW // 2
    window = torch.exp(-at.square() / (2 * SIGMA**2))
    window = (window / window.sum()).to(a.device, torch.float32)
    total = 0.0
    for done, (x, y) in enumerate(zip(a, b, strict=True), start=1):
        total += _ssim_frame(x.float(), y.float(), window)
        if on_frame is not None:
            on_frame(done, len(a))
    return total / len(a)


def flicker(a: torch.Tensor, b: torch.Tensor) -> float:
    """How much the error of `a` against `b`, (T, ...) uint8 both, moves from frame to frame; 0 for one frame.

    Raises:
        ValueError: if the clips are not both uint8 of one shape.
    """
    _check(a, b)
    error = a.float() - b.float()
    return error.diff(dim=0).abs().mean().item() if len(a) > 1 else 0.0


def composition(a: torch.Tensor, b: torch.Tensor) -> float:
    """How alike two clips are laid out, -1 to 1, as the module defines it; two clips without any layout are
    alike, one without is not.

    Args:
        a, b: (T, H, W, 3) uint8.

    Raises:
        ValueError: if the clips are not both uint8 of one 4-D shape with three channels.
    """
    _check(a, b)
    if a.ndim != 4 or a.shape[-1] != 3:
        raise ValueError(f"composition needs (T, H, W, 3) clips, got {tuple(a.shape)}")
    x, y = _layout(a), _layout(b)
    norms = x.norm() * y.norm()
    if norms == 0:
        return float(x.norm() == y.norm())
    return ((x * y).sum() / norms).item()


def _layout(clip: torch.Tensor) -> torch.Tensor:
    """(T, rows, columns) float64 luma of coarse cells, each frame less its mean."""
    side = min(clip.shape[1:3])
    size = [max(1, round(length * CELLS / side)) for length in clip.shape[1:3]]
    weights = torch.tensor(LUMA, dtype=torch.float64, device=clip.device)
    cells = torch.stack([F.adaptive_avg_pool2d((frame.double() @ weights)[None], size)[0] for frame in clip])
    return cells - cells.mean((1, 2), keepdim=True)


def _ssim_frame(x: torch.Tensor, y: torch.Tensor, window: torch.Tensor) -> float:
    """SSIM of one frame, (H, W, C) float32.

    Variances are taken about the mean of each frame: E x² − (E x)² of bright pixels would lose them.
    """
    about_x, about_y = x.mean(), y.mean()
    x, y = (x - about_x).movedim(-1, 0)[:, None], (y - about_y).movedim(-1, 0)[:, None]

    def blur(image: torch.Tensor) -> torch.Tensor:
        return F.conv2d(F.conv2d(image, window.view(1, 1, -1, 1)), window.view(1, 1, 1, -1))

    mean_x, mean_y = blur(x), blur(y)
    var_x, var_y = blur(x * x) - mean_x**2, blur(y * y) - mean_y**2
    covariance = blur(x * y) - mean_x * mean_y
    mean_x, mean_y = mean_x + about_x, mean_y + about_y
    top = (2 * mean_x * mean_y + C1) * (2 * covariance + C2)
    return (top / ((mean_x**2 + mean_y**2 + C1) * (var_x + var_y + C2))).mean(dtype=torch.float64).item()


def _check(a: torch.Tensor, b: torch.Tensor) -> None:
    if a.dtype != torch.uint8 or b.dtype != torch.uint8 or a.shape != b.shape:
        raise ValueError(
            f"need two uint8 clips of one shape, got {tuple(a.shape)} {a.dtype} and "
            f"{tuple(b.shape)} {b.dtype}"
        )
