import pytest
import torch
from sixbit_diffusion.engine.intervals import bootstrap_mean, wilson
from sixbit_diffusion.engine.trajectory import relative_errors


def test_relative_errors_are_per_stream():
    full = torch.ones(2, 4, 4)
    changed = full.clone()
    changed[1] *= 1.5
    assert relative_errors(changed, full).tolist() == [0.0, 0.5]


def test_intervals():
    low, high = wilson(8, 10)
    assert (low, high) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))
    assert wilson(5, 5)[1] == 1.0
    mean, low, high = bootstrap_mean([0.0, 1.0] * 50)
    assert mean == 0.5 and 0.38 < low < 0.45 and 0.55 < high < 0.62
    assert bootstrap_mean([1.0, 2.0, 3.0]) == bootstrap_mean([1.0, 2.0, 3.0])
