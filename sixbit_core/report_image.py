"""The picture of a run: blocks downwards, evaluations across, one cell for each.

A cell is filled from below in proportion to the MACs that ran in each format, so a block that mixes
formats shows its mixture; a skipped block is empty with a dash. Under the grid: the average bits of each
evaluation, as a line for what ran and as bars with skipped blocks at 0. The colours are Okabe and Ito's,
told apart by colour-blind eyes and by their lightness. Pillow alone, drawn at twice the nominal size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from .replacing import replacing
from .report import CODES, RunReport

COLOURS = {"nvfp4": "#56B4E9", "int8": "#D55E00", "bf16": "#0072B2", "skipped": "#F2F2F2"}
LABELS = {"nvfp4": "NVFP4 (4 bits)", "int8": "INT8 (8 bits)", "bf16": "16 bits", "skipped": "skipped"}
EFFECTIVE_COLOUR = "#BBBBBB"
TEXT, FAINT, BACKGROUND = "#222222", "#777777", "#FFFFFF"
SCALE = 2  # device pixels per nominal one
_LEFT, _TOP, _RIGHT, _GAP, _STRIP, _BOTTOM = 64, 76, 24, 34, 84, 40
_MIN_WIDTH = 560


@dataclass(frozen=True)
class _Grid:
    """Places in device pixels."""

    cell_width: int
    cell_height: int
    evaluations: int
    blocks: int

    @property
    def left(self) -> int:
        return _LEFT * SCALE

    @property
    def top(self) -> int:
        return _TOP * SCALE

    @property
    def right(self) -> int:
        return self.left + self.cell_width * self.evaluations

    @property
    def bottom(self) -> int:
        return self.top + self.cell_height * self.blocks

    @property
    def strip_top(self) -> int:
        return self.bottom + _GAP * SCALE

    @property
    def strip_bottom(self) -> int:
        return self.strip_top + _STRIP * SCALE

    @property
    def size(self) -> tuple[int, int]:
        width = max(self.right + _RIGHT * SCALE, _MIN_WIDTH * SCALE)
        return width, self.strip_bottom + _BOTTOM * SCALE


def draw_run(report: RunReport, path: Path) -> None:
    """Draw a run to a PNG file, written beside `path` and then put in its place.

    Raises:
        ValueError: if nothing ran.
    """
    with replacing(Path(path)) as beside:
        render_run(report).save(beside, format="PNG")


def render_run(report: RunReport) -> Image.Image:
    """The picture as an RGB image. Raises ValueError if nothing ran."""
    if not report.evaluations or not report.blocks:
        raise ValueError("there is no run to draw: sample with the model first")
    grid = _Grid(
        SCALE * min(max(760 // report.evaluations, 5), 24),
        SCALE * min(max(460 // report.blocks, 5), 24),
        report.evaluations,
        report.blocks,
    )
    image = Image.new("RGB", grid.size, BACKGROUND)
    draw = ImageDraw.Draw(image)
    _draw_heading(draw, report)
    _draw_cells(draw, report, grid)
    _draw_axes(draw, grid)
    _draw_strip(draw, report, grid)
    return image


def _draw_heading(draw: ImageDraw.ImageDraw, report: RunReport) -> None:
    draw.text((16 * SCALE, 10 * SCALE), _headline(report), fill=TEXT, font=_font(15))
    draw.text((16 * SCALE, 32 * SCALE), _subline(report), fill=FAINT, font=_font(11))
    x, y, size = 16 * SCALE, 53 * SCALE, 10 * SCALE
    for name in _formats_present(report):
        draw.rectangle((x, y, x + size, y + size), fill=COLOURS[name], outline=FAINT)
        if name == "skipped":
            _dash(draw, (x, y, x + size, y + size))
        draw.text((x + size + 5 * SCALE, y - 2 * SCALE), LABELS[name], fill=TEXT, font=_font(11))
        x += size + 22 * SCALE + round(draw.textlength(LABELS[name], font=_font(11)))


def _headline(report: RunReport) -> str:
    parts = []
    if report.average_activation_bits is not None:
        parts.append(f"{report.average_activation_bits:.2f} bits on average")
    if report.skipped_fraction:
        parts.append(f"{100 * report.skipped_fraction:.0f} % of blocks skipped")
        parts.append(f"{report.effective_activation_bits:.2f} bits with skipped at 0")
    return "Activations: " + ", ".join(parts or ["nothing ran"])


def _subline(report: RunReport) -> str:
    parts = [f"router {report.router}" if report.router else "linears left in 16 bits"]
    if report.cache is None:
        parts.append("no delta cache")
    else:
        threshold, skips = report.cache["threshold"], report.cache["max_skips"]
        parts.append(f"delta cache: threshold {threshold:g}, at most {skips} skips in a row")
        parts.append(f"{report.cache_bytes / 2**20:.3g} MiB")
    return "   |   ".join(parts)


def _formats_present(report: RunReport) -> list[str]:
    letters = set("".join(text for texts in report.choices.values() for text in texts))
    return [name for name, code in CODES.items() if code in letters]


def _draw_cells(draw: ImageDraw.ImageDraw, report: RunReport, grid: _Grid) -> None:
    names = {code: name for name, code in CODES.items()}
    gap = SCALE if min(grid.cell_width, grid.cell_height) > 6 * SCALE else 1
    for block in range(grid.blocks):
        for evaluation in range(grid.evaluations):
            x = grid.left + evaluation * grid.cell_width
            y = grid.top + block * grid.cell_height
            box = (x, y, x + grid.cell_width - 1 - gap, y + grid.cell_height - 1 - gap)
            shares: dict[str, float] = {}
            for kind, texts in report.choices.items():
                name = names.get(texts[block][evaluation])
                if name is not None:
                    shares[name] = shares.get(name, 0.0) + report.mac_share[kind]
            _fill_cell(draw, box, shares)


def _fill_cell(draw: ImageDraw.ImageDraw, box: tuple[int, int, int, int], shares: dict[str, float]) -> None:
    x0, y0, x1, y1 = box
    if "skipped" in shares:
        draw.rectangle(box, fill=COLOURS["skipped"])
        _dash(draw, box)
        return
    height, total, below = y1 - y0 + 1, sum(shares.values()), 0.0
    for name in CODES:  # finest on top
        if shares.get(name):
            low = y1 - round(height * below / total)
            below += shares[name]
            draw.rectangle((x0, y1 - round(height * below / total) + 1, x1, low), fill=COLOURS[name])


def _dash(draw: ImageDraw.ImageDraw, box: tuple[int, int, int, int]) -> None:
    x0, y0, x1, y1 = box
    middle, inset = (y0 + y1) // 2, max((x1 - x0) // 4, 1)
    draw.rectangle((x0 + inset, middle - SCALE // 2, x1 - inset, middle), fill="#BBBBBB")


def _draw_axes(draw: ImageDraw.ImageDraw, grid: _Grid) -> None:
    font = _font(10)
    for block in _ticks(grid.blocks, grid.cell_height):
        y = grid.top + block * grid.cell_height + grid.cell_height // 2
        draw.text((grid.left - 6 * SCALE, y), str(block), fill=TEXT, font=font, anchor="rm")
    for evaluation in _ticks(grid.evaluations, grid.cell_width):
        x = grid.left + evaluation * grid.cell_width + grid.cell_width // 2
        draw.text((x, grid.bottom + 4 * SCALE), str(evaluation), fill=TEXT, font=font, anchor="ma")
        draw.text((x, grid.strip_bottom + 4 * SCALE), str(evaluation), fill=TEXT, font=font, anchor="ma")
    draw.text((16 * SCALE, grid.top - 1), "block", fill=FAINT, font=font)
    middle = (grid.left + grid.right) // 2
    draw.text((middle, grid.strip_bottom + 20 * SCALE), "evaluation", fill=FAINT, font=font, anchor="ma")


def _draw_strip(draw: ImageDraw.ImageDraw, report: RunReport, grid: _Grid) -> None:
    values = [v for v in report.bits_by_evaluation if v is not None]
    top_bits = 16 if any(v > 8.0 for v in values) else 8

    def height(bits: float) -> int:
        return grid.strip_bottom - round((grid.strip_bottom - grid.strip_top) * bits / top_bits)

    for bits in range(0, top_bits + 1, 4):
        y = height(bits)
        draw.line((grid.left, y, grid.right, y), fill="#DDDDDD", width=1)
        draw.text((grid.left - 6 * SCALE, y), str(bits), fill=TEXT, font=_font(10), anchor="rm")
    draw.text((16 * SCALE, grid.strip_top - 1), "bits", fill=FAINT, font=_font(10))
    for evaluation in range(grid.evaluations):
        x = grid.left + evaluation * grid.cell_width
        effective = report.effective_bits_by_evaluation[evaluation]
        average = report.bits_by_evaluation[evaluation]
        x1 = x + grid.cell_width - 1 - SCALE
        if effective:
            draw.rectangle((x, height(effective), x1, grid.strip_bottom), fill=EFFECTIVE_COLOUR)
        if average is not None:
            y = height(average)
            draw.rectangle((x, y - SCALE, x1, y + SCALE - 1), fill=TEXT)
    note = "bar: skipped blocks at 0 bits    line: what ran"
    draw.text((grid.left, grid.strip_top - 4 * SCALE), note, fill=FAINT, font=_font(9), anchor="ls")


def _ticks(count: int, cell: int) -> Sequence[int]:
    """Indices to label, at least 18 nominal pixels apart."""
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, count) if s * cell >= 18 * SCALE or s >= count)
    return range(0, count, step)


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size * SCALE)
