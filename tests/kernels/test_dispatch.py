"""An op runs the first twin that can take the arguments, else its reference, and never retries."""

from __future__ import annotations

import pytest
import torch
from sixbit_diffusion.kernels import Op, quantize_int8, use_backend


@pytest.fixture
def op() -> Op:
    @Op
    def double(x: int) -> tuple[str, int]:
        """Twice x."""
        return "reference", 2 * x

    @double.register("small", when=lambda x: x < 10)
    def _small(x: int) -> tuple[str, int]:
        return "small", 2 * x

    @double.register("broken", when=lambda x: x < 100)
    def _broken(x: int) -> tuple[str, int]:
        raise RuntimeError("a bug")

    return double


def test_first_twin_that_can_take_the_arguments_runs(op: Op):
    assert op(3) == ("small", 6)
    assert op(1000) == ("reference", 2000)
    assert op.select(50) == "broken"


def test_a_twin_that_raises_is_not_retried(op: Op):
    with pytest.raises(RuntimeError, match="a bug"):
        op(50)


def test_use_backend_forces_and_restores(op: Op):
    with use_backend("small"):
        assert op(1000) == ("small", 2000)
        with use_backend("reference"):
            assert op(3) == ("reference", 6)
        assert op(1000) == ("small", 2000)
    assert op(1000) == ("reference", 2000)


def test_an_unknown_backend_is_named(op: Op):
    with (
        use_backend("cuda"),
        pytest.raises(ValueError, match="double has no backend 'cuda'; it has reference"),
    ):
        op(3)


def test_the_reference_serves_on_the_cpu():
    assert quantize_int8.select(torch.zeros(1, 16)) == "reference"
    assert quantize_int8.__doc__.startswith("Quantize each row")
