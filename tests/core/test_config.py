import pytest
from sixbit_diffusion.sixbit_core.config import (
    CACHE_LOCATIONS,
    PRESETS,
    DeltaCacheConfig,
    DMPQConfig,
    override,
)
from sixbit_diffusion.sixbit_core.delta_codecs import CODECS
from sixbit_diffusion.sixbit_core.router import AUTO, ROUTERS
from sixbit_diffusion.sixbit_core.skip import SKIP_POLICIES


@pytest.mark.parametrize(
    ("config", "values", "message"),
    [
        (DMPQConfig, {"bits": 3.9}, "between 4 and 8, got 3.9"),
        (DMPQConfig, {"bits": float("nan")}, "between 4 and 8"),
        (DMPQConfig, {"error": "mine"}, "excess, paper"),
        (DMPQConfig, {"outlier_limit": 0.0}, "above 0"),
        (DeltaCacheConfig, {"threshold": -0.1}, "0 or more"),
        (DeltaCacheConfig, {"threshold": float("nan")}, "0 or more"),
        (DeltaCacheConfig, {"max_skips": -1}, "0 or more"),
        (DeltaCacheConfig, {"start": 0.5, "end": 0.5}, "got 0.5 and 0.5"),
        (DeltaCacheConfig, {"end": 1.1}, "end <= 1"),
        (DMPQConfig, {"bits_of": "luck"}, "routing, run.*'luck'"),
        (DeltaCacheConfig, {"location": "disk"}, "gpu-nvfp4.*'disk'"),
    ],
)
def test_wrong_values_are_named(config, values, message):
    with pytest.raises(ValueError, match=message):
        config(**values)


def test_defaults_and_presets():
    assert DMPQConfig() == DMPQConfig("gamma", 6.0, True, 0)
    assert DeltaCacheConfig() == DeltaCacheConfig(0.15, 2, 0.25, 1.0, "auto", "error-budget")
    assert set(PRESETS) == {"balanced", "quality", "fast", "paper"}
    assert all(preset.dmpq.router in {AUTO, *ROUTERS} for preset in PRESETS.values())
    assert all(preset.cache.policy in SKIP_POLICIES for preset in PRESETS.values())
    paper = PRESETS["paper"]
    assert (paper.dmpq.router, paper.dmpq.outlier_limit, paper.dmpq.error) == ("gamma", 25.0, "paper")
    assert paper.cache.start == 0.0


def test_every_location_has_a_codec():
    assert set(CACHE_LOCATIONS) == {"auto", *CODECS}


def test_the_users_value_wins_over_the_presets():
    fast = PRESETS["fast"].cache
    changed = override(fast, {"threshold": 0.0, "start": None})
    assert (changed.threshold, changed.start, changed.max_skips) == (0.0, fast.start, fast.max_skips)
    with pytest.raises(ValueError, match="max_skips"):
        override(fast, {"max_skips": -2})
