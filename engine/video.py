"""Clips in and out: mp4 through PyAV (h264 where the build has it, else mpeg4), sheets through Pillow."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from ..sixbit_core.replacing import replacing
from .errors import InputError

CODECS = ("libx264", "libopenh264", "mpeg4")
PAD, INK, PAPER = 8, (30, 30, 30), (255, 255, 255)


def find_codec() -> str:
    """Name of the first encoder of `CODECS` that this PyAV has. InputError where there is no PyAV."""
    try:
        import av
    except ImportError as error:
        raise InputError("writing mp4 needs PyAV: pip install av") from error
    for name in CODECS:
        try:
            av.Codec(name, "w")
            return name
        except ValueError:  # av raises a subclass for an unknown codec
            continue
    raise InputError(f"this PyAV has none of the encoders {', '.join(CODECS)}; pip install av")


def write_mp4(path: Path, frames: np.ndarray, fps: int) -> None:
    """Write a clip.

    Args:
        path: the mp4 to write, whole or not at all.
        frames: (T, H, W, 3) uint8, H and W even.
        fps: frames per second.
    """
    import av

    codec = find_codec()
    # absolute: a name with a colon would be read as a URL
    with replacing(path) as temporary, av.open(str(temporary.absolute()), "w") as container:
        stream = container.add_stream(codec, rate=fps)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.options = {"crf": "12"} if codec == "libx264" else {"qscale": "2"}
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), "rgb24")))
        container.mux(stream.encode())


def write_sheet(path: Path, rows: Sequence[tuple[str, np.ndarray]], columns: int = 6) -> None:
    """Lay clips above each other, some of their frames across.

    Args:
        path: the png to write.
        rows: (label, (T, H, W, 3) uint8) from top to bottom, all of one shape.
        columns: how many frames of each clip, evenly spread, first and last among them.
    """
    total, height, width = rows[0][1].shape[:3]
    picks = sorted({round(i * (total - 1) / max(1, columns - 1)) for i in range(columns)})
    zoom = max(1, math.ceil(192 / width))
    size = max(13, width * zoom // 16)
    font = ImageFont.load_default(size)
    line = size + 2 * PAD
    sheet_width = PAD + len(picks) * (width * zoom + PAD)
    sheet = Image.new("RGB", (sheet_width, line + len(rows) * (line + height * zoom + PAD)), PAPER)
    draw = ImageDraw.Draw(sheet)
    for column, pick in enumerate(picks):
        draw.text((PAD + column * (width * zoom + PAD), PAD), f"frame {pick + 1}", INK, font)
    for row, (label, clip) in enumerate(rows):
        top = line + row * (line + height * zoom + PAD)
        draw.text((PAD, top + PAD // 2), label, INK, font)
        for column, pick in enumerate(picks):
            image = Image.fromarray(clip[pick]).resize(
                (width * zoom, height * zoom), Image.Resampling.LANCZOS
            )
            sheet.paste(image, (PAD + column * (width * zoom + PAD), top + line))
    with replacing(path) as temporary:
        sheet.save(temporary)


def read_image(path: Path) -> Image.Image:
    """Read an image for image-to-video. Raises InputError for what is not one."""
    try:
        return Image.open(path).convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise InputError(f"--image {path} cannot be read as an image: {error}") from error
