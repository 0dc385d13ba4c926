"""What the pictures share: nominal pixels, drawn at twice that for sharp screens, one font, two inks."""

from PIL import ImageDraw, ImageFont

SCALE = 2  # device pixels per nominal one
DPI = (96 * SCALE, 96 * SCALE)  # so that a viewer shows it at its nominal size
TEXT, FAINT, RULE, BACKGROUND = "#222222", "#6B6B6B", "#DDDDDD", "#FFFFFF"

Box = tuple[float, float, float, float]


def font(size: float) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Pillow's own font, `size` nominal pixels high."""
    return ImageFont.load_default(size * SCALE)


def width_of(text: str, size: float) -> float:
    """Nominal pixels that a line takes."""
    return font(size).getlength(text) / SCALE


def write(
    draw: ImageDraw.ImageDraw,
    at: tuple[float, float],
    text: str,
    size: float,
    fill: str = TEXT,
    anchor: str = "la",
) -> None:
    """A line of text at a nominal place; anchors are Pillow's."""
    draw.text((at[0] * SCALE, at[1] * SCALE), text, fill=fill, font=font(size), anchor=anchor)


def fill(draw: ImageDraw.ImageDraw, box: Box, colour: str) -> None:
    """A rectangle (left, top, right, bottom) in nominal pixels, of a device pixel at least."""
    x0, y0, x1, y1 = (round(side * SCALE) for side in box)
    draw.rectangle((x0, y0, max(x1 - 1, x0), max(y1 - 1, y0)), fill=colour)
