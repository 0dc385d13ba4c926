from dataclasses import replace
from itertools import pairwise

import pytest
from PIL import Image, ImageColor
from sixbit_diffusion.sixbit_core.layout import BlockLayout
from sixbit_diffusion.sixbit_core.report import Ledger, RunReport
from sixbit_diffusion.sixbit_core.report_image import COLOURS, draw_run, render_run


def make_report(blocks: int, evaluations: int) -> RunReport:
    """Block 0 all INT8; block 1 three quarters NVFP4; odd evaluations of the others skipped, else 16 bits."""
    layout = BlockLayout(("q", "ff"), ({"q": (16, 16), "ff": (48, 16)},) * blocks)
    ledger = Ledger(layout)
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
    return ledger.report("gamma", None, {"threshold": 0.15, "max_skips": 2}, 2**22)


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
