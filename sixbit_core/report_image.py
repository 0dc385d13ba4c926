"""The picture of a run: blocks downwards, evaluations across, one cell for each.

A cell is filled from below in proportion to the MACs that ran in each format, so a block that mixes
formats shows its mixture; a skipped block is empty with a dash. Under the grid stand the bits and the
seconds of each evaluation, and the memory of the run (`report_panels`). The colours are Okabe and Ito's, told
apart by colour-blind eyes and by their lightness. Pillow alone, drawn at twice the nominal size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw

from .drawing import BACKGROUND, DPI, FAINT, SCALE, TEXT, Box, fill, width_of, write
from .replacing import replacing
from .report import CODES, RunMemory, RunReport
from .report_panels import MEMORY_HEIGHT, STRIP_TITLE, draw_bits, draw_memory, draw_seconds

COLOURS = {"nvfp4": "#56B4E9", "int8": "#D55E00", "bf16": "#0072B2", "skipped": "#F2F2F2"}
LABELS = {"nvfp4": "NVFP4 (4 bits)", "int8": "INT8 (8 bits)", "bf16": "16 bits", "skipped": "skipped"}
_EDGE, _LEFT, _TOP, _AXIS, _GAP = 16, 78, 80, 22, 14
_BITS, _SECONDS = 72 + STRIP_TITLE, 48 + STRIP_TITLE
_WIDE, _HIGH = 760, 460  # what a grid may take, cells permitting
_LEAST_WIDTH = 480  # of the panels, however few the evaluations


@dataclass(frozen=True)
class _Grid:
    """The cells, in nominal pixels."""

    cell_width: int
    cell_height: int
    evaluations: int
    blocks: int

    @property
    def lefts(self) -> list[float]:
        return [_LEFT + self.cell_width * place for place in range(self.evaluations)]

    @property
    def right(self) -> float:
        return _LEFT + self.cell_width * self.evaluations

    @property
    def bottom(self) -> float:
        return _TOP + self.cell_height * self.blocks

    def box(self, block: int, evaluation: int) -> Box:
        """A cell without the gap that parts it from the next."""
        gap = 1 if min(self.cell_width, self.cell_height) > 6 else 0.5
        x, y = _LEFT + self.cell_width * evaluation, _TOP + self.cell_height * block
        return x, y, x + self.cell_width - gap, y + self.cell_height - gap


def draw_run(report: RunReport, path: Path, memory: RunMemory | None = None) -> None:
    """Draw a run to a PNG file, written beside `path` and then put in its place.

    Raises:
        ValueError: if nothing ran.
    """
    with replacing(Path(path)) as beside:
        render_run(report, memory).save(beside, format="PNG", dpi=DPI)


def render_run(report: RunReport, memory: RunMemory | None = None) -> Image.Image:
    """The picture as an RGB image, without bars of memory where `memory` is None.

    Raises:
        ValueError: if nothing ran.
    """
    if not report.evaluations or not report.blocks:
        raise ValueError("there is no run to draw: sample with the model first")
    grid = _Grid(
        min(max(_WIDE // report.evaluations, 5), 48),
        min(max(_HIGH // report.blocks, 5), 24),
        report.evaluations,
        report.blocks,
    )
    lines = [(_headline(report), 15), (_subline(report), 11)]
    right = max(grid.right, _LEFT + _LEAST_WIDTH, *(_EDGE + width_of(text, size) for text, size in lines))
    strips = [(draw_bits, _BITS)]
    if report.seconds_by_evaluation:
        strips.append((draw_seconds, _SECONDS))
    bottom = grid.bottom + _AXIS + sum(high + _GAP for _, high in strips) - _GAP + _AXIS
    height = bottom + (0 if memory is None else _GAP + MEMORY_HEIGHT) + _EDGE
    image = Image.new("RGB", (round((right + _EDGE) * SCALE), round(height * SCALE)), BACKGROUND)
    draw = ImageDraw.Draw(image)
    for (text, size), y, ink in zip(lines, (10, 33), (TEXT, FAINT), strict=True):
        write(draw, (_EDGE, y), text, size, ink)
    _draw_legend(draw, report)
    _draw_cells(draw, report, grid)
    _draw_blocks(draw, grid)
    _draw_evaluations(draw, grid, grid.bottom)
    top = grid.bottom + _AXIS
    for strip, high in strips:
        strip(draw, report, grid.lefts, grid.cell_width, top, high)
        top += high + _GAP
    _draw_evaluations(draw, grid, top - _GAP)
    if memory is not None:
        draw_memory(draw, report, memory, _LEFT, right - _LEFT, bottom + _GAP)
    return image


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
    if report.seconds_by_evaluation:
        count = "1 evaluation" if report.evaluations == 1 else f"{report.evaluations} evaluations"
        parts.append(f"{count} in {sum(report.seconds_by_evaluation):.3g} s")
    return "   |   ".join(parts)


def _draw_legend(draw: ImageDraw.ImageDraw, report: RunReport) -> None:
    letters = set("".join(text for texts in report.choices.values() for text in texts))
    x, y, size = _EDGE, 55, 10
    for name in (name for name, code in CODES.items() if code in letters):
        fill(draw, (x, y, x + size, y + size), FAINT)
        fill(draw, (x + 0.5, y + 0.5, x + size - 0.5, y + size - 0.5), COLOURS[name])
        if name == "skipped":
            _dash(draw, (x, y, x + size, y + size))
        write(draw, (x + size + 5, y + size / 2), LABELS[name], 11, TEXT, "lm")
        x += size + 22 + width_of(LABELS[name], 11)


def _draw_cells(draw: ImageDraw.ImageDraw, report: RunReport, grid: _Grid) -> None:
    names = {code: name for name, code in CODES.items()}
    for block in range(grid.blocks):
        for evaluation in range(grid.evaluations):
            shares: dict[str, float] = {}
            for kind, texts in report.choices.items():
                name = names.get(texts[block][evaluation])
                if name is not None:
                    shares[name] = shares.get(name, 0.0) + report.mac_share[kind]
            _fill_cell(draw, grid.box(block, evaluation), shares)


def _fill_cell(draw: ImageDraw.ImageDraw, box: Box, shares: dict[str, float]) -> None:
    x0, y0, x1, y1 = box
    if "skipped" in shares:
        fill(draw, box, COLOURS["skipped"])
        _dash(draw, box)
        return
    total, below = sum(shares.values()), 0.0
    for name in CODES:  # finest on top
        if shares.get(name):
            low = y1 - (y1 - y0) * below / total
            below += shares[name]
            fill(draw, (x0, y1 - (y1 - y0) * below / total, x1, low), COLOURS[name])


def _dash(draw: ImageDraw.ImageDraw, box: Box) -> None:
    x0, y0, x1, y1 = box
    middle, inset = (y0 + y1) / 2, max((x1 - x0) / 4, 0.5)
    fill(draw, (x0 + inset, middle - 0.5, x1 - inset, middle + 0.5), "#9A9A9A")


def _draw_blocks(draw: ImageDraw.ImageDraw, grid: _Grid) -> None:
    write(draw, (_EDGE, _TOP), "block", 10, FAINT)
    for block in _ticks(grid.blocks, grid.cell_height, 14):
        write(draw, (_LEFT - 6, _TOP + (block + 0.5) * grid.cell_height), str(block), 10, TEXT, "rm")


def _draw_evaluations(draw: ImageDraw.ImageDraw, grid: _Grid, top: float) -> None:
    """Numbers of the evaluations under a strip or the grid."""
    write(draw, (_EDGE, top + 4), "evaluation", 10, FAINT)
    for evaluation in _ticks(grid.evaluations, grid.cell_width, 24):
        x = _LEFT + (evaluation + 0.5) * grid.cell_width
        write(draw, (x, top + 4), str(evaluation), 10, TEXT, "ma")


def _ticks(count: int, cell: int, apart: int) -> Sequence[int]:
    """Indices to label, at least so many nominal pixels apart."""
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, count) if s * cell >= apart or s >= count)
    return range(0, count, step)
