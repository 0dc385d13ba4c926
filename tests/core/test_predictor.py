import json
import math
from dataclasses import replace

import pytest
from sixbit_diffusion.sixbit_core.config import DMPQConfig
from sixbit_diffusion.sixbit_core.fits import MAGNITUDES, BlockFit, Line, LinearFit, Plane
from sixbit_diffusion.sixbit_core.layout import BlockLayout
from sixbit_diffusion.sixbit_core.predictor import Predictor, load_predictor

LAYOUT = BlockLayout(("q", "ff"), ({"q": (16, 16), "ff": (64, 16)},))
LINE, TIMED = Line(0.1, 1 / 3, 0.4), Plane(0.1, -0.2, 0.3, 0.5)
PREDICTOR = Predictor(
    family="cogvideox-5b",
    fingerprint="0123456789abcdef0123",
    calibration={"steps": 50, "cfg": 6.0, "size": [480, 720], "prompts": 16},
    linears={
        "blocks.0.q": LinearFit(
            Line(0.1, 1 / 3, 0.4), Line(1.0, 2.0, 0.5), 0.09, 0.01, (0.1,) * 10, 256, TIMED
        ),
        "blocks.0.ff": LinearFit(Line(-0.1, 0.2, 0.2), None, 0.08, 0.01, (), 1024),
    },
    outlier_limits={"q": 9.5},
    theta={"5.0": {"cache_off": 0.4, "cache_on": 0.5}, "7.0": {"cache_off": 0.2}},
    blocks=(BlockFit(0.1, tuple(1.0 + n for n in range(MAGNITUDES))),),
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


def test_a_file_of_before_keeps_loading(path):
    document = json.loads(path.read_text())
    del document["linears"]["blocks.0.q"]["timed"], document["blocks"]
    path.write_text(json.dumps(document))
    assert load_predictor(path).linears["blocks.0.q"].timed is None
    assert load_predictor(path).blocks == ()
    assert not {'"timed"', '"blocks"'} & set(load_predictor(path).to_json().split())


def test_magnitudes_are_interpolated():
    fit = PREDICTOR.blocks[0]
    assert [fit.magnitude(p) for p in (-1.0, 0.0, 0.01, 0.5, 0.97, 0.98, 1.0)] == pytest.approx(
        [1.0, 1.0, 1.5, 26.0, 49.5, 50.0, 50.0]
    )


def test_tolerances_even_out_what_a_stale_residual_adds():
    fits = tuple(BlockFit(gamma, (1.0,) * MAGNITUDES) for gamma in (0.1, 0.4, 100.0, 0.2))
    tolerances = replace(PREDICTOR, blocks=fits).block_tolerances()
    mean = (0.1 * 0.4 * 100.0 * 0.2) ** 0.25
    assert tolerances == pytest.approx((4.0, mean / 0.4, 0.25, 4.0 if mean / 0.2 > 4 else mean / 0.2))


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
