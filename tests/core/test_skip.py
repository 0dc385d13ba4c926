from dataclasses import replace

import pytest
from sixbit_diffusion.sixbit_core.config import DeltaCacheConfig
from sixbit_diffusion.sixbit_core.skip import SKIP_POLICIES, Observation, hashed_unit

CONFIG = DeltaCacheConfig(threshold=0.15, max_skips=2, start=0.25, end=0.9)


@pytest.mark.parametrize(
    ("progress", "change", "accumulated", "consecutive", "expected"),
    [
        (0.5, 0.1, 0.0, 0, True),
        (0.5, 0.1, 0.049, 1, True),
        (0.5, 0.1, 0.05, 1, False),  # E_acc + r < τ, not <=
        (0.5, 0.15, 0.0, 0, False),
        (0.5, 0.01, 0.0, 2, False),
        (0.25, 0.1, 0.0, 0, True),
        (0.249, 0.1, 0.0, 0, False),
        (0.9, 0.1, 0.0, 0, False),
    ],
)
def test_error_budget(progress, change, accumulated, consecutive, expected):
    seen = Observation(0, 5, progress, change, accumulated, consecutive)
    assert SKIP_POLICIES["error-budget"](seen, CONFIG) is expected


def test_random_skips_the_asked_share_within_the_limits():
    config = DeltaCacheConfig(threshold=0.3, start=0.25)
    random = SKIP_POLICIES["random"]
    drawn = [random(Observation(b, t, 0.5, 9.0, 9.0, 0), config) for b in range(40) for t in range(50)]
    assert abs(sum(drawn) / len(drawn) - 0.3) < 0.03
    other = replace(config, seed=1)
    assert drawn != [random(Observation(b, t, 0.5, 9.0, 9.0, 0), other) for b in range(40) for t in range(50)]
    assert not any(random(Observation(b, 0, 0.1, 0.0, 0.0, 0), config) for b in range(40))
    assert not any(random(Observation(b, 0, 0.5, 0.0, 0.0, 2), config) for b in range(40))


def test_hash_is_the_same_everywhere():
    assert hashed_unit("route", 0, 3, 7, "q") == 0.6533770902882372
