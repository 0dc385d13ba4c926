"""Two clips measured against each other, and drawn beside each other. Knows no host.

PSNR, SSIM and composition are of frames rounded to 8 bits, as `sixbit_core.metrics` defines them. Seconds are
those of sampling, read from the text of 6Bit Run Report.
"""

import json
from dataclasses import asdict, dataclass

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from ..sixbit_core.metrics import COMPOSITION_HELD, OnFrame, composition, psnr, ssim

Two = tuple[torch.Tensor, torch.Tensor]  # (T, H, W, 3 or 4) float in [0, 1]
_GAP, _PAD = 8, 4  # pixels between the clips, and around a line of text
_LEAST_TEXT, _MOST_TEXT = 8, 24
_INK, _FAINT, _PAPER = "#222222", "#6B6B6B", "#FFFFFF"


@dataclass(frozen=True)
class Comparison:
    """What two clips have in common.

    Attributes:
        labels, seconds: of the first and the second; seconds are None where no report was given.
        psnr_db, ssim, composition: see `sixbit_core.metrics`.
        composition_held: whether that is at least `COMPOSITION_HELD`.
    """

    labels: tuple[str, str]
    seconds: tuple[float | None, float | None]
    psnr_db: float
    ssim: float
    composition: float
    composition_held: bool

    def to_dict(self) -> dict:
        """Plain dicts and lists, ready for JSON."""
        return asdict(self)

    def figures(self) -> str:
        """What stands above both clips."""
        held = "composition held" if self.composition_held else "composition changed"
        return f"PSNR {self.psnr_db:.1f} dB   SSIM {self.ssim:.3f}   {held} ({self.composition:.2f})"

    def captions(self) -> tuple[str, str]:
        """What stands above each."""
        first, second = (
            label if seconds is None else f"{label}, {seconds:.1f} s"
            for label, seconds in zip(self.labels, self.seconds, strict=True)
        )
        return first, second

    def line(self) -> str:
        """For people."""
        return "; ".join([*self.captions(), ", ".join(self.figures().split("   "))])


def compare(
    clips: Two, labels: tuple[str, str], reports: tuple[str, str], on_frame: OnFrame | None = None
) -> Comparison:
    """Measure two clips. Raises ValueError where they differ in length or size, or a report is none.

    `on_frame` is called frame by frame of what takes long, SSIM; what it raises ends the comparison.
    """
    shapes = [f"{clip.shape[0]} frames of {clip.shape[2]}x{clip.shape[1]}" for clip in clips]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"Compare Clips needs two clips of one length and size, got {shapes[0]} and {shapes[1]}; sample "
            "both from one latent"
        )
    a, b = ((clip[..., :3].float() * 255).round().clamp(0, 255).to(torch.uint8) for clip in clips)
    seconds = (seconds_of(reports[0], "report_a"), seconds_of(reports[1], "report_b"))
    alike, near = round(composition(a, b), 4), round(ssim(a, b, on_frame), 6)
    return Comparison(labels, seconds, round(psnr(a, b), 4), near, alike, alike >= COMPOSITION_HELD)


def seconds_of(report: str, name: str) -> float | None:
    """Seconds of sampling in the text of 6Bit Run Report; None for no text. `name` is for the message."""
    if not report.strip():
        return None
    try:
        return round(sum(json.loads(report.strip().splitlines()[-1])["seconds_by_evaluation"]), 3)
    except (ValueError, KeyError, TypeError):
        raise ValueError(
            f"{name} needs the text that 6Bit Run Report gives, got {report[:40]!r}; connect its last output"
        ) from None


def side_by_side(clips: Two, found: Comparison) -> torch.Tensor:
    """(T, bar + H, 2 W + 8, 3) float32: frames in step under one bar of captions. Its height is even."""
    frames, height, width = clips[0].shape[:3]
    whole = 2 * width + _GAP
    size = min(max(whole // 24, 11), _MOST_TEXT)
    row = size + 2 * _PAD
    bar = 2 * row + (2 * row + height) % 2
    image = Image.new("RGB", (whole, bar), _PAPER)
    draw = ImageDraw.Draw(image)
    for left, caption in zip((0, width + _GAP), found.captions(), strict=True):
        _write(draw, (left + _PAD, row / 2), caption, width - 2 * _PAD, size, _INK)
    _write(draw, (_PAD, row * 1.5), found.figures(), whole - 2 * _PAD, size, _FAINT)
    out = torch.ones(frames, bar + height, whole, 3)
    out[:, :bar] = torch.from_numpy(np.array(image, dtype=np.float32) / 255)
    out[:, bar:, :width] = clips[0][..., :3]
    out[:, bar:, width + _GAP :] = clips[1][..., :3]
    return out


def _write(
    draw: ImageDraw.ImageDraw, at: tuple[float, float], text: str, room: float, size: int, ink: str
) -> None:
    """A line, made smaller where it does not fit, and cut where it would be too small to read."""
    while size > _LEAST_TEXT and _length(text, size) > room:
        size -= 1
    if _length(text, size) > room:
        while text and _length(f"{text}…", size) > room:
            text = text[:-1]
        text = f"{text}…"
    draw.text(at, text, fill=ink, font=ImageFont.load_default(size), anchor="lm")


def _length(text: str, size: int) -> float:
    return ImageFont.load_default(size).getlength(text)
