"""What the kernel tests share: a device, a way to run a twin, and when two results count as the same."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sixbit_diffusion.kernels import Op, use_backend

HAS_TRITON = importlib.util.find_spec("triton") is not None


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where a twin runs: interpreted on the CPU, or compiled on a GPU."""
    if not HAS_TRITON:
        pytest.skip("Triton is not installed")
    if request.param == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("on a GPU the kernels are compiled, so that the CPU cannot interpret them")
    return request.param


@pytest.fixture
def run_both() -> Callable[..., tuple[tuple, tuple]]:
    """Run an op by its reference and by its twin; results as tuples, checked for shape and type."""

    def run(op: Op, *args: Any, **kwargs: Any) -> tuple[tuple, tuple]:
        results = []
        for backend in ("reference", "triton"):
            with use_backend(backend):
                result = op(*args, **kwargs)
            results.append(result if isinstance(result, tuple) else (result,))
        for expected, got in zip(*results, strict=True):
            assert got.shape == expected.shape and got.dtype == expected.dtype
        return results[0], results[1]

    return run


@pytest.fixture
def assert_same(device: str) -> Callable[[Any, Any], None]:
    """Bits equal, NaN included; but one unit in the last place of bfloat16 on the CPU, where the
    interpreter truncates float32 to bfloat16 instead of rounding (Triton 3.9)."""

    def check(expected: Any, got: Any) -> None:
        if isinstance(expected, tuple):
            for a, b in zip(expected, got, strict=True):
                check(a, b)
        elif expected.element_size() == 1:
            assert torch.equal(expected.view(torch.uint8), got.view(torch.uint8))
        elif expected.dtype == torch.bfloat16 and device == "cpu":
            torch.testing.assert_close(got, expected, rtol=2**-7, atol=0, equal_nan=True)
        else:
            torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)

    return check


@pytest.fixture
def make() -> Callable[..., torch.Tensor]:
    """A tensor of one seed; `integers` gives whole numbers, whose Hadamard sums are exact in any order."""

    def build(
        *shape: int,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        seed: int = 0,
        integers: bool = False,
    ) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(shape, generator=generator)
        x = (x * 16).round().clamp(-100, 100) if integers else x * 3
        return x.to(dtype).to(device)

    return build
