from dataclasses import replace

import pytest
from sixbit_diffusion.sixbit_core.config import DMPQConfig
from sixbit_diffusion.sixbit_core.fits import Line, LinearFit, Plane
from sixbit_diffusion.sixbit_core.formats import FORMATS
from sixbit_diffusion.sixbit_core.layout import BlockLayout
from sixbit_diffusion.sixbit_core.predictor import Predictor
from sixbit_diffusion.sixbit_core.router import ROUTERS, resolve_router
from sixbit_diffusion.sixbit_core.router_tables import Place, RouterTables, int8_split, progress_bin

LAYOUT = BlockLayout(("q", "ff"), ({"q": (16, 16), "ff": (48, 16)},) * 2)
LEVEL = Line(0.0, 0.0, 0.0)
EARLY, LATE = (0.5,) * 5 + (0.0,) * 5, (0.0,) * 5 + (0.5,) * 5


def fit(gain, by_progress, macs, paper=LEVEL):
    return LinearFit(
        Line(1.0, 0.0, 1.0), paper, 0.01 + gain, 0.01, by_progress, macs, Plane(1.0, 0.5, 0.0, 1.0)
    )


PREDICTOR = Predictor(
    "toy",
    "f" * 16,
    {},
    {
        "blocks.0.q": fit(0.1, EARLY, 256),
        "blocks.0.ff": fit(0.2, EARLY, 768),
        "blocks.1.q": fit(0.05, LATE, 256),
        "blocks.1.ff": fit(0.3, LATE, 768),
    },
    {},
    {"6.0": {"cache_off": 0.5, "cache_on": 0.2, "paper_cache_off": -1.0, "time_cache_off": 0.6}},
)


def route(
    name, block=0, kind="q", gamma=0.3, evaluation=1, progress=0.0, cache_on=False, last=False, **settings
):
    tables = RouterTables(DMPQConfig(router=name, **settings), LAYOUT, PREDICTOR, cache_on)
    return ROUTERS[name](Place(evaluation, progress, block, kind, gamma, last), tables)


def average_bits(name, evaluations, **settings):
    tables = RouterTables(DMPQConfig(router=name, **settings), LAYOUT, PREDICTOR, False)
    total = weight = 0
    for t in range(evaluations):
        for _, block, kind in LAYOUT.linear_names():
            chosen = ROUTERS[name](Place(t, t / evaluations, block, kind, 0.3, t == evaluations - 1), tables)
            total += FORMATS[chosen].bits * LAYOUT.macs(block, kind)
            weight += LAYOUT.macs(block, kind)
    return total / weight


def test_gamma():
    assert route("gamma", gamma=0.51) == "int8"
    assert route("gamma", gamma=0.5) == "nvfp4"  # α·Γ + β > θ, not >=
    assert route("gamma", gamma=None) == "int8"
    assert route("gamma", gamma=0.3, cache_on=True, bits_of="run") == "int8"
    assert route("gamma", gamma=0.3, cache_on=True) == "nvfp4"  # the threshold of the routing alone
    assert route("gamma", gamma=0.3, error="paper") == "int8"  # its line is level at 0, its θ -1
    assert route("gamma", gamma=9.0, bits=4.0) == "nvfp4"
    assert route("gamma", gamma=-9.0, bits=8.0) == "int8"


def test_gamma_by_the_papers_error_needs_it():
    linears = {**PREDICTOR.linears, "blocks.1.ff": fit(0.3, LATE, 768, paper=None)}
    bare = Predictor("toy", "f", {}, linears, {}, PREDICTOR.theta)
    tables = RouterTables(DMPQConfig(error="paper"), LAYOUT, bare, False)
    with pytest.raises(ValueError, match="full-precision model"):
        ROUTERS["gamma"](Place(1, 0.0, 0, "q", 0.3), tables)


def test_gamma_time_adds_progress():
    # Γ + progress / 2 > 0.6
    assert route("gamma-time", gamma=0.4, progress=0.5) == "int8"
    assert route("gamma-time", gamma=0.4, progress=0.3) == "nvfp4"
    assert route("gamma-time", gamma=0.4, progress=0.5, cache_on=True, bits_of="run") == "int8"
    assert route("gamma-time", gamma=None) == "int8"


def test_gamma_time_needs_its_data():
    linears = {**PREDICTOR.linears, "blocks.1.ff": replace(PREDICTOR.linears["blocks.1.ff"], timed=None)}
    tables = RouterTables(DMPQConfig(router="gamma-time"), LAYOUT, replace(PREDICTOR, linears=linears), False)
    with pytest.raises(ValueError, match="Γ and progress: calibrate again"):
        ROUTERS["gamma-time"](Place(1, 0.0, 0, "q", 0.3), tables)


@pytest.mark.parametrize("evaluations", [25, 50])
@pytest.mark.parametrize("bits", [5.0, 6.0, 7.0])
def test_protect_has_exactly_the_bits(evaluations, bits):
    # one evaluation of the largest linear is 4 * 768 / 2048 / evaluations = 0.03 bits at 50
    assert abs(average_bits("protect", evaluations, bits=bits) - bits) <= 1.5 / evaluations
    ends = [0, 0.079, 1 / evaluations]
    assert all(route("protect", 1, "q", progress=p, bits=4.0) == "int8" for p in ends)
    assert route("protect", 1, "q", evaluation=24, progress=0.96, last=True, bits=4.0) == "int8"
    assert route("protect", 1, "q", evaluation=24, progress=0.96, bits=4.0) == "nvfp4"


def test_protect_prefers_what_static_prefers():
    shares = {
        (b, k): sum(route("protect", b, k, evaluation=t, progress=t / 50) == "int8" for t in range(4, 49))
        for _, b, k in LAYOUT.linear_names()
    }
    # 5.8 bits are left for 45 evaluations, 44 % of the MACs: 0.q 12.5 %, 1.ff the next 37.5 %
    assert shares == {(0, "q"): 45, (1, "ff"): 38, (0, "ff"): 0, (1, "q"): 0}


def test_static_takes_the_greatest_gain_per_mac_that_fits():
    # gain per MAC: 0.q 0.1/256, 1.ff 0.3/768 (equal, so by name), 0.ff 0.2/768, 1.q 0.05/256; budget 1024
    chosen = {(b, k) for _, b, k in LAYOUT.linear_names() if route("static", b, k) == "int8"}
    assert chosen == {(0, "q"), (1, "ff")}
    assert average_bits("static", 3) == 6.0
    assert average_bits("static", 3, bits=4.0) == 4.0 and average_bits("static", 3, bits=8.0) == 8.0


def test_static_time_follows_the_error_through_sampling():
    assert [route("static-time", 0, "ff", progress=p) for p in (0.1, 0.9)] == ["int8", "nvfp4"]
    assert [route("static-time", 1, "ff", progress=p) for p in (0.1, 0.9)] == ["nvfp4", "int8"]
    assert average_bits("static-time", 10) == 6.0
    assert [progress_bin(p) for p in (0.0, 0.0999, 0.1, 0.999, 1.0)] == [0, 0, 1, 9, 9]


@pytest.mark.parametrize("bits", [4.0, 5.0, 6.0, 8.0])
def test_random_meets_the_bits_and_can_be_drawn_again(bits):
    assert abs(average_bits("random", 1000, bits=bits) - bits) < 0.1
    drawn = [[route("random", evaluation=t, seed=seed) for t in range(40)] for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_fixed_precisions():
    assert [route(name) for name in FORMATS] == list(FORMATS)


def test_every_router_names_a_format():
    assert all(route(name) in FORMATS for name in ROUTERS)


def test_a_router_without_its_predictor_says_so():
    for name in ("gamma", "gamma-time", "static", "static-time", "protect"):
        tables = RouterTables(DMPQConfig(router=name), LAYOUT, None, False)
        with pytest.raises(ValueError, match=f'"{name}" needs a predictor'):
            ROUTERS[name](Place(1, 0.0, 0, "q", 0.3), tables)


def test_auto_is_gamma_with_a_predictor_and_says_when_not():
    auto = DMPQConfig(router="auto", bits=5.0)
    assert resolve_router(auto, PREDICTOR) == (DMPQConfig(router="gamma", bits=5.0), None)
    config, note = resolve_router(auto, None)
    assert config.router == "int8" and "no predictor" in note and "5 bits" in note
    with pytest.raises(ValueError, match="auto, bf16, gamma"):
        resolve_router(DMPQConfig(router="best"), None)


def test_split_passes_over_what_does_not_fit():
    items = [("big", 9.0, 60), ("mid", 5.0, 50), ("small", 0.5, 10)]
    assert int8_split(items, 6.0) == {"big"}
    assert int8_split(items, 6.4) == {"big", "small"}
    assert int8_split([("dense", 1.0, 10), ("fat", 2.0, 60)], 4.0 + 4 * 60 / 70) == {"dense"}
    assert int8_split(items, 4.0) == frozenset() and len(int8_split(items, 8.0)) == 3


def test_int8_protect_is_in_16_bits_at_both_ends():
    formats = [ROUTERS["int8-protect"](Place(n, n / 50, 0, "q", None, last=n == 49), None) for n in range(50)]
    assert formats == ["bf16"] * 4 + ["int8"] * 45 + ["bf16"]


@pytest.mark.parametrize("first", [9, 10, 19])
def test_protect_routes_runs_that_begin_in_the_middle(first):
    formats = {
        route("protect", 1, "q", evaluation=t, progress=(first + t) / 20, last=first + t == 19)
        for t in range(20 - first)
    }
    assert "int8" in formats and formats <= {"int8", "nvfp4"}
