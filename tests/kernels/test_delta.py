"""Adding a stored residual: rounded once, to the type of x, into a new tensor or a given one."""

from __future__ import annotations

import pytest
import torch
from sixbit_diffusion.kernels import apply_delta, use_backend

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("delta_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (7, 123), pytest.param((2, 1234, 3072), marks=pytest.mark.gpu)])
def test_twin_equals_reference(device, run_both, assert_same, make, shape, dtype, delta_dtype):
    x = make(*shape, dtype=dtype, device=device)
    delta = make(*shape, dtype=delta_dtype, device=device, seed=1)
    before = x.clone()
    expected, got = run_both(apply_delta, x, delta)
    assert_same(expected, got)
    assert torch.equal(x, before) and expected[0].data_ptr() != x.data_ptr()
    assert torch.equal(expected[0], (x.float() + delta.float()).to(dtype))


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_into_a_given_tensor(device, make, backend):
    x, delta = make(7, 123, device=device), make(7, 123, device=device, seed=1)
    whole = torch.full((9, 123), torch.nan, device=device)
    with use_backend(backend):
        expected = apply_delta(x, delta)
        assert apply_delta(x, delta, whole[1:8]).data_ptr() == whole[1].data_ptr()
        apply_delta(x, delta, x)
    assert torch.equal(whole[1:8], expected) and torch.equal(x, expected)
    assert whole[0].isnan().all() and whole[8].isnan().all()
    with use_backend(backend), pytest.raises(ValueError, match=r"needs out as contiguous \(7, 123\) float32"):
        apply_delta(x, delta, whole)


def test_strides_do_not_matter(device, run_both, assert_same, make):
    x, delta = make(6, 8, device=device), make(8, 6, device=device, seed=1)
    assert_same(*run_both(apply_delta, x, delta.T))


def test_wrong_arguments_are_named():
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"one shape, got \(2, 3\) float32 and \(3, 2\) float32"):
        apply_delta(x, torch.zeros(3, 2))
    with pytest.raises(
        ValueError, match=r"apply_delta needs a float16, bfloat16 or float32 tensor, got \(2, 3\) int8"
    ):
        apply_delta(x, torch.zeros(2, 3, dtype=torch.int8))
