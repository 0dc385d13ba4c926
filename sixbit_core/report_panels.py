"""What stands under the grid of a run's picture: bits and seconds of each evaluation, and bars of memory.

Every panel takes the place it is given and never draws outside it.
"""

import math
from collections.abc import Sequence

from PIL import ImageDraw

from .drawing import FAINT, RULE, TEXT, fill, width_of, write
from .report import RunMemory, RunReport, spelled_bytes

BAR, TIME_BAR = "#BBBBBB", "#7A7A7A"
OURS, FULL = "#222222", "#BBBBBB"
STRIP_TITLE = 20  # height of a strip's own line above it
MEMORY_HEIGHT = 62
_BEYOND = 3.0  # times the next slowest: the scale is not that of an evaluation that compiled kernels
_STEPS = (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10)


def draw_bits(
    draw: ImageDraw.ImageDraw, report: RunReport, lefts: Sequence[float], cell: float, top: float, high: float
) -> None:
    """Bits by evaluation: a line for what ran, a bar with skipped blocks at 0.

    Args:
        lefts: of each evaluation's column; `cell`, its width.
        top, high: of the strip with its title.
    """
    values = [bits for bits in report.bits_by_evaluation if bits is not None]
    most = next(end for end in (8, 12, 16) if all(bits <= end for bits in values))
    low, span = top + high, high - STRIP_TITLE
    marks = range(0, most + 1, 8 if most == 16 else 4)
    _rules(draw, lefts, cell, low, span, {f"{bits}": bits / most for bits in marks})
    left = lefts[0]
    write(draw, (left, top), "bits", 10)
    left += width_of("bits", 10) + 14
    fill(draw, (left, top + 5, left + 12, top + 7), TEXT)
    write(draw, (left + 16, top), "what ran", 10, FAINT)
    left += 30 + width_of("what ran", 10)
    fill(draw, (left, top + 2, left + 8, top + 11), BAR)
    write(draw, (left + 12, top), "skipped blocks at 0", 10, FAINT)
    for x, average, effective in zip(
        lefts, report.bits_by_evaluation, report.effective_bits_by_evaluation, strict=True
    ):
        right = x + cell - 1
        if effective:
            fill(draw, (x, low - span * effective / most, right, low), BAR)
        if average is not None:
            y = low - span * average / most
            fill(draw, (x, y - 1, right, y + 1), TEXT)


def draw_seconds(
    draw: ImageDraw.ImageDraw, report: RunReport, lefts: Sequence[float], cell: float, top: float, high: float
) -> None:
    """Seconds by evaluation, placed as in `draw_bits`. One far above the others is cut, and said in words."""
    seconds = report.seconds_by_evaluation
    low, span = top + high, high - STRIP_TITLE
    most = max(seconds)
    second = sorted(seconds)[-2] if len(seconds) > 1 else most
    cut = most > _BEYOND * second > 0
    scale = nice_above(second if cut else most)
    _rules(draw, lefts, cell, low, span, {"0": 0, f"{scale:g}": 1})
    write(draw, (lefts[0], top), "seconds", 10)
    if cut:
        beyond = seconds.index(most)
        said = f"evaluation {beyond} took {most:.3g}, beyond the scale"
        write(draw, (lefts[0] + width_of("seconds", 10) + 14, top), said, 10, FAINT)
    for x, value in zip(lefts, seconds, strict=False):  # the last has none where a run was cut short
        fill(draw, (x, low - span * min(value / scale, 1), x + cell - 1, low), TIME_BAR)


def draw_memory(
    draw: ImageDraw.ImageDraw, report: RunReport, memory: RunMemory, left: float, width: float, top: float
) -> None:
    """Weights at the left, peak memory at the right, each over the same in 16 bits."""
    half = (width - 24) / 2
    _pair(draw, "weights", (memory.weights, memory.weights_16_bit), "16 bits", left, half, top)
    right = left + half + 24
    if memory.peak is None:
        write(draw, (right, top), "peak memory", 10)
        write(draw, (right, top + 18), "not counted here", 10, FAINT)
        return
    known = full_precision_peak(report, memory)
    values = (memory.peak,) if known is None else (memory.peak, known[0])
    _pair(draw, "peak memory", values, "" if known is None else f"16 bits, {known[1]}", right, half, top)


def full_precision_peak(report: RunReport, memory: RunMemory) -> tuple[int, str] | None:
    """Peak of the run in full precision and how it is known: measured, or computed from this run's.

    computed = peak - weights + weights in 16 bits - delta cache on the device. None where the weights
    were not all on the device, of which nothing follows.
    """
    if memory.peak is None:
        return None
    if memory.peak_16_bit is not None:
        return memory.peak_16_bit, "measured"
    if not memory.weights_on_device or memory.peak < memory.weights:
        return None
    cache = report.cache_bytes if report.cache and report.cache["location"] != "host" else 0
    return memory.peak - memory.weights + memory.weights_16_bit - cache, "computed"


def nice_above(value: float) -> float:
    """The least of `_STEPS` times a power of ten that is not below `value`; 1 for 0."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(float(f"{step * power:.3g}") for step in _STEPS if step * power >= value * (1 - 1e-9))


def _rules(
    draw: ImageDraw.ImageDraw,
    lefts: Sequence[float],
    cell: float,
    low: float,
    span: float,
    marks: dict[str, float],
) -> None:
    """Lines across a strip, with their labels at the left."""
    for label, share in marks.items():
        y = low - span * share
        fill(draw, (lefts[0], y, lefts[-1] + cell, y + 0.5), RULE)
        write(draw, (lefts[0] - 6, y), label, 10, TEXT, "rm")


def _pair(
    draw: ImageDraw.ImageDraw,
    title: str,
    values: tuple[int, ...],
    full: str,
    left: float,
    width: float,
    top: float,
) -> None:
    """A bar of this run, and under it one in full precision; their values at the ends."""
    write(draw, (left, top), title, 10)
    if len(values) == 2 and values[0]:
        ratio = f"{values[1] / values[0]:.2f}x smaller" if values[1] > values[0] else "not smaller"
        write(draw, (left + width_of(title, 10) + 14, top), ratio, 10, FAINT)
    labels = ("this run", full)
    names = max(width_of(label, 10) for label in labels[: len(values)]) + 8
    room = width - names - max(width_of(spelled_bytes(value), 10) for value in values) - 6
    for row, (label, value) in enumerate(zip(labels, values, strict=False)):
        y = top + 20 + 20 * row
        long = max(room * value / max(values), 1)
        write(draw, (left, y + 6), label, 10, FAINT, "lm")
        fill(draw, (left + names, y, left + names + long, y + 13), (OURS, FULL)[row])
        write(draw, (left + names + long + 6, y + 6), spelled_bytes(value), 10, TEXT, "lm")
