from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, combinations, pairwise

import pytest
from PIL import Image, ImageColor, ImageDraw
from sixbit_diffusion.sixbit_core.drawing import SCALE, TEXT
from sixbit_diffusion.sixbit_core.layout import BlockLayout
from sixbit_diffusion.sixbit_core.report import Ledger, RunMemory, RunReport
from sixbit_diffusion.sixbit_core.report_image import COLOURS, draw_run, render_run
from sixbit_diffusion.sixbit_core.report_panels import (
    BAR,
    FULL,
    OURS,
    STRIP_TITLE,
    TIME_BAR,
    draw_bits,
    draw_memory,
    draw_seconds,
    full_precision_peak,
    nice_above,
)

MEMORY = RunMemory(3_000, 12_000, 9_000 + 2**22)


def make_report(blocks: int, evaluations: int, seconds: Sequence[float] | None = None) -> RunReport:
    """Block 0 all INT8; block 1 three quarters NVFP4; odd evaluations of the others skipped, else 16 bits."""
    layout = BlockLayout(("q", "ff"), ({"q": (16, 16), "ff": (48, 16)},) * blocks)
    begins = iter(accumulate([0.0, *(seconds or [1.0] * evaluations)]))
    ledger = Ledger(layout, lambda: next(begins))
    for t in range(evaluations):
        ledger.begin_evaluation(t / evaluations)
        for block in range(blocks):
            if block >= 2 and t % 2:
                ledger.skipped(block, 1, 4)
                continue
            names = [("int8", "int8"), ("int8", "nvfp4")][block] if block < 2 else ("bf16", "bf16")
            for kind, name in zip(("q", "ff"), names, strict=True):
                ledger.ran(block, kind, name, 4)
            ledger.computed(1)
    ledger.end()
    return ledger.report("gamma", None, {"threshold": 0.15, "max_skips": 2, "location": "gpu"}, 2**22)


def share(image: Image.Image, name: str) -> float:
    """Pixels of a format's colour, of all that are of any format's."""
    counts = {colour: count for count, colour in image.getcolors(1 << 24)}
    found = {key: counts.get(ImageColor.getrgb(value), 0) for key, value in COLOURS.items()}
    return found[name] / sum(found.values())


@pytest.mark.parametrize(("blocks", "evaluations"), [(2, 1), (3, 2), (12, 50), (42, 50), (30, 100)])
def test_file_is_written_whole_at_any_size(tmp_path, blocks, evaluations):
    path = tmp_path / "run.png"
    draw_run(make_report(blocks, evaluations), path)
    assert [p.name for p in tmp_path.iterdir()] == ["run.png"]
    with Image.open(path) as image:
        assert image.mode == "RGB" and 1000 <= image.width <= 2400 and 200 <= image.height <= 2400
        assert image.info["dpi"] == pytest.approx((192, 192), abs=1)  # twice the nominal size


def test_area_is_the_share_of_macs():
    image = render_run(make_report(4, 20))
    assert share(image, "int8") == pytest.approx((1 + 0.25) / 4, abs=0.03)
    assert share(image, "nvfp4") == pytest.approx(0.75 / 4, abs=0.03)
    assert share(image, "bf16") == pytest.approx(0.25, abs=0.03)
    assert share(image, "skipped") > 0.2


def test_legend_shows_only_what_is_there():
    assert share(render_run(make_report(2, 4)), "bf16") == 0 < share(render_run(make_report(3, 4)), "bf16")


def test_colours_differ_in_lightness():
    grey = sorted(
        0.3 * red + 0.59 * green + 0.11 * blue
        for red, green, blue in map(ImageColor.getrgb, COLOURS.values())
    )
    assert all(lighter - darker > 25 for darker, lighter in pairwise(grey))


def test_nothing_to_draw_is_said(tmp_path):
    with pytest.raises(ValueError, match="no run to draw"):
        draw_run(replace(make_report(2, 1), evaluations=0), tmp_path / "x.png")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("memory", [None, MEMORY, replace(MEMORY, peak=None), replace(MEMORY, peak=1)])
@pytest.mark.parametrize(("blocks", "evaluations"), [(2, 1), (30, 4), (12, 50), (42, 50), (30, 100)])
def test_no_word_overlaps_another_or_leaves_the_picture(monkeypatch, blocks, evaluations, memory):
    boxes, own = [], ImageDraw.ImageDraw.text

    def text(draw, at, words, **how):
        boxes.append(draw.textbbox(at, words, font=how["font"], anchor=how["anchor"]))
        own(draw, at, words, **how)

    monkeypatch.setattr(ImageDraw.ImageDraw, "text", text)
    seconds = [90.0] + [1.0] * (evaluations - 1)
    image = render_run(make_report(blocks, evaluations, seconds), memory)
    assert len(boxes) > 10
    for left, top, right, bottom in boxes:
        assert left >= 0 and top >= 0 and right <= image.width and bottom <= image.height
    for a, b in combinations(boxes, 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1], (a, b)


def drawn(panel, size, *arguments) -> Image.Image:
    image = Image.new("RGB", size, "#FFFFFF")
    panel(ImageDraw.Draw(image), *arguments)
    return image


def pixels(image: Image.Image, colour: str) -> int:
    return sum(count for count, found in image.getcolors(1 << 24) if found == ImageColor.getrgb(colour))


def test_area_of_the_seconds_is_the_time_of_the_run():
    lefts = [40.0 + 10 * t for t in range(4)]
    made = {}
    for name, seconds in {"even": [2.0] * 4, "half": [2.0, 1.0, 1.0, 0.0], "stall": [90.0, 2, 2, 2]}.items():
        report = make_report(2, 4, seconds)
        made[name] = pixels(drawn(draw_seconds, (900, 200), report, lefts, 10, 4, 80), TIME_BAR)
    assert made["half"] == pytest.approx(made["even"] / 2, rel=0.02)
    assert made["stall"] == pytest.approx(made["even"], rel=0.01)  # cut at the others' scale; words beside it


def rows(image: Image.Image, x: float, top: float, colour: str) -> list[float]:
    """Where a column of the picture has a colour, in nominal pixels below `top`."""
    ink = ImageColor.getrgb(colour)
    found = range(round(top * SCALE), image.height)
    return [y / SCALE for y in found if image.getpixel((round(x * SCALE), y)) == ink]


def test_bars_and_lines_of_the_bits_are_as_high_as_the_bits():
    report = make_report(4, 4)  # odd evaluations skip half of the blocks
    lefts, top, high, most = [40.0 + 40 * t for t in range(4)], 10, 180, 12
    image = drawn(draw_bits, (500, 500), report, lefts, 40, top, high)
    span = high - STRIP_TITLE
    seen = []
    for left, ran, all_of_it in zip(
        lefts, report.bits_by_evaluation, report.effective_bits_by_evaluation, strict=True
    ):
        bar, line = (rows(image, left + 20, top + STRIP_TITLE, ink) for ink in (BAR, TEXT))
        covered = len(line) if ran == all_of_it else 0  # the line lies on the end of the bar
        assert (len(bar) + covered / 2) / SCALE == pytest.approx(span * all_of_it / most, abs=1)
        assert sum(line) / len(line) == pytest.approx(top + high - span * ran / most, abs=1)
        seen.append((ran, all_of_it))
    assert seen[0][0] == seen[0][1] and seen[1][1] < seen[1][0]  # both kinds were looked at


def test_bars_of_memory_are_as_the_bytes():
    image = drawn(draw_memory, (1400, 200), make_report(2, 4), replace(MEMORY, peak=None), 10, 600, 4)
    lengths = []
    for row, colour in ((60, OURS), (100, FULL)):
        ink = ImageColor.getrgb(colour)
        line = "".join("x" if image.getpixel((x, row)) == ink else " " for x in range(image.width))
        lengths.append(max(map(len, line.split())))
    assert lengths[0] == pytest.approx(lengths[1] * MEMORY.weights / MEMORY.weights_16_bit, rel=0.03)


def test_peak_in_full_precision_is_measured_or_computed_or_unknown():
    report = make_report(2, 4)
    assert full_precision_peak(report, MEMORY) == (18_000, "computed")  # the delta cache would not be there
    assert full_precision_peak(report, replace(MEMORY, peak_16_bit=7)) == (7, "measured")
    assert full_precision_peak(report, replace(MEMORY, peak=2_999)) is None  # weights were offloaded
    host = replace(report, cache={**report.cache, "location": "host"})
    assert full_precision_peak(host, MEMORY) == (18_000 + 2**22, "computed")


def test_scales_end_on_a_round_number():
    assert [nice_above(x) for x in (0, 0.034, 0.04, 1.2, 9, 101)] == [1, 0.04, 0.04, 1.5, 10, 150]
