"""The contact sheet of `sixbit verify`: prompts downwards, methods across, three frames of each clip.

Over each column stand its means, under each clip its own figures; PSNR and SSIM are against full precision.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from ..sixbit_core.drawing import BACKGROUND, DPI, FAINT, RULE, SCALE, TEXT, fill, width_of, write
from ..sixbit_core.replacing import replacing

FRAME_WIDTH = 96
_EDGE, _GAP, _BETWEEN = 16, 2, 14  # around all, between frames of a clip, between clips
_TITLE, _SIZE, _LINE = 15, 11, 16
_ABOVE, _COLUMN = 2 * _LINE + 14, 3 * _LINE + 10  # what the title takes, and the heads of the columns


@dataclass(frozen=True)
class Sheet:
    """What to draw.

    Attributes:
        result: as `verify` writes it.
        frames: by prompt and method, in the result's order, (up to 3, H, W, 3) uint8 each.
    """

    result: dict[str, Any]
    frames: Sequence[Sequence[np.ndarray]]

    @property
    def across(self) -> int:
        """Frames of a clip."""
        return len(self.frames[0][0])

    @property
    def cell(self) -> tuple[int, int]:
        """Width and height of a clip in nominal pixels, its caption not counted."""
        height, width = self.result["size"]
        across = max(self.across, 2)  # captions need the room of two
        return across * FRAME_WIDTH + (across - 1) * _GAP, round(FRAME_WIDTH * height / width)


def draw_sheet(sheet: Sheet, path: Path) -> None:
    """Draw to a PNG file, written beside `path` and then put in its place."""
    (cell_width, cell_height), result = sheet.cell, sheet.result
    methods = list(result["methods"])
    row_height = _LINE + cell_height + _LINE + _BETWEEN
    width = 2 * _EDGE + len(methods) * (cell_width + _BETWEEN) - _BETWEEN
    height = 2 * _EDGE + _ABOVE + _COLUMN + len(sheet.frames) * row_height - _BETWEEN
    image = Image.new("RGB", (width * SCALE, height * SCALE), BACKGROUND)
    draw = ImageDraw.Draw(image)
    inside = width - 2 * _EDGE
    write(draw, (_EDGE, _EDGE), cut(_title(result), _TITLE, inside), _TITLE)
    write(draw, (_EDGE, _EDGE + _LINE + 6), cut(_made_with(result), _SIZE, inside), _SIZE, FAINT)
    lefts = [_EDGE + column * (cell_width + _BETWEEN) for column in range(len(methods))]
    rows = {(row["prompt"], row["method"]): row for row in result["clips"]}
    for name, left in zip(methods, lefts, strict=True):
        told, means = result["methods"][name], result["means"][name]
        averages = {key: found["mean"] for key, found in means.items()}
        lines = (told["title"], f"mean {_caption(averages)}", _shares(averages))
        for number, (line, size) in enumerate(zip(lines, (_SIZE + 1, _SIZE, _SIZE), strict=True)):
            at = (left, _EDGE + _ABOVE + number * _LINE)
            write(draw, at, cut(line, size, cell_width), size, FAINT if number else TEXT)
    for number, clips in enumerate(sheet.frames):
        top = _EDGE + _ABOVE + _COLUMN + number * row_height
        fill(draw, (_EDGE, top - 6, width - _EDGE, top - 5.5), RULE)
        told = f"{number + 1}. {result['prompts'][number]} (seed {result['seeds'][number]})"
        write(draw, (_EDGE, top), cut(told, _SIZE, inside), _SIZE)
        for name, left, frames in zip(methods, lefts, clips, strict=True):
            for place, frame in enumerate(frames):
                x, y = left + place * (FRAME_WIDTH + _GAP), top + _LINE
                pixels = (FRAME_WIDTH * SCALE, cell_height * SCALE)
                shown = Image.fromarray(frame).resize(pixels, Image.Resampling.LANCZOS)
                edge = (x * SCALE - 1, y * SCALE - 1, x * SCALE + pixels[0], y * SCALE + pixels[1])
                draw.rectangle(edge, outline=RULE)  # a clip may be as white as the paper
                image.paste(shown, (x * SCALE, y * SCALE))
            caption = cut(_caption(rows[number, name], result["steps"]), _SIZE, cell_width)
            write(draw, (left, top + _LINE + cell_height + 2), caption, _SIZE)
    with replacing(path) as temporary:
        image.save(temporary, dpi=DPI)


def cut(text: str, size: float, width: float) -> str:
    """The text, or as much of it as fits into `width` nominal pixels, with dots for the rest."""
    if width_of(text, size) <= width:
        return text
    low, high = 0, len(text)
    while low < high:  # the longest beginning that fits
        middle = (low + high + 1) // 2
        if width_of(text[:middle].rstrip() + "…", size) <= width:
            low = middle
        else:
            high = middle - 1
    return text[:low].rstrip() + "…"


def _title(result: dict[str, Any]) -> str:
    height, width = result["size"]
    return (
        f"{result['model']} ({result['family']}, {result['fingerprint'][:12]}): {result['frames']} frames of "
        f"{height}x{width}, {result['steps']} steps, guidance {result['cfg']:g}"
    )


def _made_with(result: dict[str, Any]) -> str:
    libraries = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return f"{result['machine']}; {libraries}; {result['date']}; PSNR and SSIM against full precision"


def _caption(row: dict[str, Any], steps: int | None = None) -> str:
    """PSNR, SSIM and seconds of a clip, or of means; its steps where they are not `steps`."""
    words = [] if row.get("psnr_db") is None else [f"PSNR {row['psnr_db']:.1f} dB", f"SSIM {row['ssim']:.3f}"]
    words += [f"{row['seconds']:.1f} s"]
    words += [] if steps in (None, row.get("steps")) else [f"{row['steps']} steps"]
    return ", ".join(words)


def _shares(averages: dict[str, float]) -> str:
    return f"cost {100 * averages['cost']:.0f} %, skipped {100 * averages['skipped_fraction']:.0f} %"
