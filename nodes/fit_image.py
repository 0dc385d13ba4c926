"""The picture of a calibration: one panel for each kind of linear, error over Γ, a line for each block.

Points are what was measured, lines what was fitted to them, dark for late blocks. Pillow alone.
"""

from collections.abc import Sequence
from statistics import median

from PIL import Image, ImageDraw, ImageFont

from ..sixbit_core.calibration_run import LinearRecord
from ..sixbit_core.layout import linear_name
from ..sixbit_core.predictor import Predictor

Point = tuple[float, float]
_SCALE = 2  # device pixels per nominal one
_COLUMNS, _WIDTH, _HEIGHT, _GAP, _TOP = 3, 300, 200, 44, 66
_POINTS = 1500  # of a panel at most
_EARLY, _LATE = (158, 202, 225), (8, 48, 107)
_LEGEND = (
    "error of NVFP4 over INT8 activations, by gamma one evaluation earlier; light: first blocks, dark: last"
)
_TEXT, _FAINT = "#222222", "#777777"


def render_fit(predictor: Predictor, records: Sequence[LinearRecord]) -> Image.Image:
    """An RGB image of how well every linear's line fits its measures."""
    known = [record for record in records if record.gamma is not None]
    kinds = list(dict.fromkeys(record.kind for record in known))
    blocks = 1 + max(record.block for record in known)
    rows = -(-len(kinds) // _COLUMNS)
    size = (_GAP + _COLUMNS * (_WIDTH + _GAP), _TOP + rows * (_HEIGHT + 2 * _GAP))
    image = Image.new("RGB", (size[0] * _SCALE, size[1] * _SCALE), "#FFFFFF")
    draw = ImageDraw.Draw(image)
    _text(draw, (_GAP / 2, 12), _headline(predictor), 15)
    _text(draw, (_GAP / 2, 36), _LEGEND, 11, _FAINT)
    for place, kind in enumerate(kinds):
        row, column = divmod(place, _COLUMNS)
        corner = (_GAP + column * (_WIDTH + _GAP), _TOP + _GAP / 2 + row * (_HEIGHT + 2 * _GAP))
        _panel(draw, corner, kind, predictor, [r for r in known if r.kind == kind], blocks)
    return image


def _headline(predictor: Predictor) -> str:
    found, how = predictor.summary(), predictor.calibration
    return (
        f"{predictor.family}: median R2 {found['median_r2']:.2f}, {found['positive_slopes']} of "
        f"{found['linears']} slopes up   ({how['steps']} steps, {how['prompts']} prompts)"
    )


def _panel(
    draw: ImageDraw.ImageDraw,
    corner: Point,
    kind: str,
    predictor: Predictor,
    records: Sequence[LinearRecord],
    blocks: int,
) -> None:
    """One kind: axes with their ends, points, lines."""
    left, top = corner
    low_x, high_x = _ends([record.gamma for record in records])
    low_y, high_y = _ends([record.excess for record in records])

    def at(gamma: float, error: float) -> Point:
        share_x, share_y = (gamma - low_x) / (high_x - low_x), (high_y - error) / (high_y - low_y)
        return (left + _WIDTH * share_x) * _SCALE, (top + _HEIGHT * share_y) * _SCALE

    draw.rectangle((*at(low_x, high_y), *at(high_x, low_y)), outline="#DDDDDD")
    for record in records[:: max(1, len(records) // _POINTS)]:
        x, y = at(record.gamma, record.excess)
        draw.ellipse((x - _SCALE, y - _SCALE, x + _SCALE, y + _SCALE), fill=_shade(record.block, blocks))
    fits = []
    for block in range(blocks):
        gammas = [record.gamma for record in records if record.block == block]
        if not gammas:
            continue
        line = predictor.linears[linear_name(block, kind)].excess
        fits.append(line.r2)
        ends = [at(gamma, line.at(gamma)) for gamma in (min(gammas), max(gammas))]
        draw.line((*ends[0], *ends[1]), fill=_shade(block, blocks), width=_SCALE)
    _text(draw, (left, top - 17), f"{kind}   median R2 {median(fits):.2f}", 12)
    _text(draw, (left, top + _HEIGHT + 4), f"{low_x:.2g}", 10, _FAINT)
    _text(draw, (left + _WIDTH, top + _HEIGHT + 4), f"gamma {high_x:.2g}", 10, _FAINT, "ra")
    _text(draw, (left - 4, top), f"{high_y:.2g}", 10, _FAINT, "ra")
    _text(draw, (left - 4, top + _HEIGHT), f"{low_y:.2g}", 10, _FAINT, "rd")


def _ends(values: Sequence[float]) -> Point:
    """Ends of an axis that all values lie inside."""
    low, high = min(values), max(values)
    margin = 0.05 * (high - low) or 1e-6
    return low - margin, high + margin


def _shade(block: int, blocks: int) -> tuple[int, int, int]:
    share = block / max(1, blocks - 1)
    return tuple(round(a + share * (b - a)) for a, b in zip(_EARLY, _LATE, strict=True))


def _text(
    draw: ImageDraw.ImageDraw, at: Point, text: str, size: int, fill: str = _TEXT, anchor: str = "la"
) -> None:
    place = (at[0] * _SCALE, at[1] * _SCALE)
    draw.text(place, text, fill=fill, font=ImageFont.load_default(size * _SCALE), anchor=anchor)
