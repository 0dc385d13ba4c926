import json
import math
import os
from dataclasses import replace

import pytest
from sixbit_diffusion.sixbit_core.config import DMPQConfig
from sixbit_diffusion.sixbit_core.layout import BlockLayout
from sixbit_diffusion.sixbit_core.predictor import Line, LinearFit, Predictor, load_predictor

LAYOUT = BlockLayout(("q", "ff"), ({"q": (16, 16), "ff": (64, 16)},))
PREDICTOR = Predictor(
    family="cogvideox-5b",
    fingerprint="0123456789abcdef0123",
    calibration={"steps": 50, "cfg": 6.0, "size": [480, 720], "prompts": 16},
    linears={
        "blocks.0.q": LinearFit(Line(0.1, 1 / 3, 0.4), Line(1.0, 2.0, 0.5), 0.09, 0.01, (0.1,) * 10, 256),
        "blocks.0.ff": LinearFit(Line(-0.1, 0.2, 0.2), None, 0.08, 0.01, (), 1024),
    },
    outlier_limits={"q": 9.5},
    theta={"5.0": {"cache_off": 0.4, "cache_on": 0.5}, "7.0": {"cache_off": 0.2}},
)


@pytest.fixture
def path(tmp_path):
    PREDICTOR.save(tmp_path / "p.json")
    return tmp_path / "p.json"


def test_save_and_load(path):
    loaded = load_predictor(path, PREDICTOR.fingerprint)
    assert loaded.linears["blocks.0.q"].excess.beta == 0.333333333  # nine significant digits
    rounded = replace(PREDICTOR.linears["blocks.0.q"], excess=Line(0.1, 0.333333333, 0.4))
    assert loaded == replace(PREDICTOR, linears={**PREDICTOR.linears, "blocks.0.q": rounded})
    assert loaded.to_json() == path.read_text()
    assert [p.name for p in path.parent.iterdir()] == ["p.json"]


def test_file_has_the_frozen_keys(path):
    document = json.loads(path.read_text())
    assert (document["format"], document["version"]) == ("sixbit-predictor", 1)
    assert document["model"] == {"family": "cogvideox-5b", "fingerprint": "0123456789abcdef0123"}
    assert set(document["linears"]["blocks.0.q"]) >= {
        "alpha",
        "beta",
        "r2",
        "error_nvfp4",
        "error_int8",
        "macs",
    }
    assert document["theta"]["5.0"] == {"cache_off": 0.4, "cache_on": 0.5}
    assert list(document) == sorted(document)


def edit(change):
    def apply(text):
        document = json.loads(text)
        change(document)
        return json.dumps(document)

    return apply


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda text: text[: len(text) // 2], "cannot be used"),
        (lambda text: "", "cannot be used"),
        (lambda text: "[]", "cannot be used"),
        (edit(lambda d: d.update(format="other")), "format is 'other'"),
        (edit(lambda d: d.update(version=2)), "version is 2, this program reads 1"),
        (edit(lambda d: d.pop("theta")), "lacks 'theta'"),
        (edit(lambda d: d["linears"]["blocks.0.q"].update(alpha=math.nan)), "holds NaN"),
        (lambda text: text.replace("0.333333333", "1e999"), "holds inf where"),
        (lambda text: text.replace("0.333333333", "1" * 400), "int too large"),
        (lambda text: text.replace("0.333333333", "1" * 5000), "digits"),
        (lambda text: text.replace('"macs": 256', '"macs": 1e999'), "holds inf where"),
        (lambda text: text.replace('"steps": 50', '"steps": 1e999'), "holds inf where"),
        (lambda text: text.replace('"7.0"', '"1e999"'), "holds inf where"),
        (lambda text: "[" * 100_000, "cannot be used: .*recursion"),
        (edit(lambda d: d["linears"]["blocks.0.q"].update(beta="x")), "holds 'x' where"),
        (edit(lambda d: d["linears"]["blocks.0.q"].pop("macs")), "lacks 'macs'"),
        (edit(lambda d: d["linears"]["blocks.0.q"].update(error_by_progress=[1.0])), "needs 10 values"),
    ],
)
def test_a_bad_file_is_one_clear_line(path, spoil, message):
    path.write_text(spoil(path.read_text()))
    with pytest.raises(ValueError, match=message) as caught:
        load_predictor(path)
    assert "\n" not in str(caught.value) and "calibrate again" in str(caught.value)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes with names")
def test_a_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / "p.json")
    with pytest.raises(ValueError, match="it is no regular file"):
        load_predictor(tmp_path / "p.json")


def test_a_missing_file_and_other_weights_are_refused(path):
    with pytest.raises(ValueError, match="no predictor file"):
        load_predictor(path.with_name("none.json"))
    with pytest.raises(ValueError, match=r"0123456789ab\).*fedcba987654\).*calibrate this model"):
        load_predictor(path, "fedcba9876543210")


def test_a_failed_save_leaves_the_old_file(path):
    before = path.read_text()
    with pytest.raises(ValueError):
        replace(PREDICTOR, outlier_limits={"q": math.nan}).save(path)
    assert path.read_text() == before and len(list(path.parent.iterdir())) == 1


def test_other_layouts_are_refused():
    PREDICTOR.check(LAYOUT)
    with pytest.raises(ValueError, match=r"blocks\.0\.q has 512 MACs a row, the predictor 256"):
        PREDICTOR.check(BlockLayout(("q", "ff"), ({"q": (32, 16), "ff": (64, 16)},)))
    with pytest.raises(ValueError, match=r"blocks\.1\.q .*no such linear"):
        PREDICTOR.check(BlockLayout(("q", "ff"), LAYOUT.shapes * 2))


def test_thresholds():
    def theta(bits, cache_on=False, **settings):
        return PREDICTOR.threshold(DMPQConfig(bits=bits, **settings), cache_on)

    assert theta(5.0) == 0.4 and theta(5.0, cache_on=True) == 0.5
    assert theta(6.0) == pytest.approx(0.3)  # half way
    assert theta(4.0) == math.inf and theta(8.0) == -math.inf
    assert theta(7.5, theta=0.7) == 0.7
    for bits, settings in [(7.5, {}), (6.0, {"error": "paper"})]:
        with pytest.raises(ValueError, match=rf"--bits {bits:g}"):
            theta(bits, **settings)
    with pytest.raises(ValueError, match="for 5 bits, 7 was"):
        theta(7.0, cache_on=True)


def test_summary():
    assert PREDICTOR.summary() == {"linears": 2, "median_r2": pytest.approx(0.3), "positive_slopes": 1}
