"""What a run observes: known values, per stream, from slices of a larger tensor."""

from __future__ import annotations

import pytest
import torch
from sixbit_diffusion.kernels import block_measures, magnitudes, outlier_ratio, ratio_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1, 1), (2, 7, 48), (3, 123, 80), (1, 226, 384)]
LARGE = [(2, 4321, 3072)]
SIZES = [*SHAPES, *(pytest.param(s, marks=pytest.mark.gpu) for s in LARGE)]


def test_known_values():
    inp = torch.tensor([[[1.0, -3.0]], [[2.0, 2.0]]])
    out = torch.tensor([[[2.0, -5.0]], [[2.0, 3.0]]])
    previous = torch.tensor([[[1.0, 0.0]], [[0.0, 2.0]]])
    measured = block_measures(inp, out, previous)
    assert torch.equal(measured, torch.tensor([[0.75, 2.0], [0.25, 0.5]]))
    alone = block_measures(inp, out)
    assert torch.equal(alone[:, 0], measured[:, 0]) and alone[:, 1].isnan().all()
    assert torch.equal(magnitudes(inp), torch.tensor([[3.0, 2.0], [2.0, 2.0]]))
    assert torch.equal(outlier_ratio(inp), torch.tensor([1.5, 1.0]))


def test_a_ratio_measured_in_pieces_is_that_of_the_whole(make):
    x = make(2, 10, 48)
    pieces = [magnitudes(x[:, :7]), magnitudes(x[:, 7:9]), magnitudes(x[:, 9:])]
    torch.testing.assert_close(ratio_of(pieces, [7, 2, 1]), outlier_ratio(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SIZES)
def test_twins_agree(device, run_both, make, shape, dtype):
    """Sums in another order; relative error 1e-5, hundreds of times less than any decision resolves."""
    inp = make(*shape, dtype=dtype, device=device)
    out = inp + make(*shape, dtype=dtype, device=device, seed=1) * 0.1
    previous = make(*shape, dtype=dtype, device=device, seed=2) * 0.1
    for delta in (previous, None):
        (expected,), (got,) = run_both(block_measures, inp, out, delta)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=0, equal_nan=True)
    (expected,), (got,) = run_both(magnitudes, inp)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=0)


def test_twin_sums_several_chunks(device, run_both, make, monkeypatch):
    from sixbit_diffusion.kernels import measures_triton

    monkeypatch.setattr(measures_triton, "CHUNK", 2 * measures_triton.BLOCK)
    x = make(2, 50, 200, device=device)
    for op, arguments in ((block_measures, (x, x * 1.5, x * 0.25)), (magnitudes, (x,))):
        (expected,), (got,) = run_both(op, *arguments)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=0)
        again = run_both(op, *arguments)[1][0]
        assert torch.equal(got, again)


def test_a_slice_of_tokens_and_any_stride(device, run_both, make):
    x = make(2, 30, 48, device=device)
    y = x + make(2, 30, 48, device=device, seed=1)
    for view in (slice(5, None), slice(None, None, 2)):
        inp, out = x[:, view], y[:, view]
        (expected,), (got,) = run_both(block_measures, inp, out)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=0, equal_nan=True)
        contiguous = block_measures(inp.contiguous(), out.contiguous())
        torch.testing.assert_close(expected, contiguous, rtol=1e-6, atol=0, equal_nan=True)
    (expected,), (got,) = run_both(outlier_ratio, x.transpose(1, 2))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=0)


def test_each_stream_by_itself(make):
    x, y = make(3, 9, 16), make(3, 9, 16, seed=1)
    together = block_measures(x, y, x)
    apart = torch.cat([block_measures(x[i : i + 1], y[i : i + 1], x[i : i + 1]) for i in range(3)])
    torch.testing.assert_close(together, apart, rtol=1e-6, atol=0)


def test_nothing_moved_and_not_finite(device, run_both):
    x = torch.ones(3, 4, 16, device=device)
    x[1, 0, 0], x[2, 0, 0] = torch.nan, torch.inf
    zero = torch.zeros_like(x)
    (expected,), (got,) = run_both(block_measures, x, x, zero)
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    assert expected[0, 0] == 0 and expected[:, 1].isnan().all()
    assert expected[1:].isnan().all()
    for (found,) in run_both(magnitudes, x):
        assert ratio_of([found]).isnan().tolist() == [False, True, True]


def test_wrong_arguments_are_named():
    x = torch.zeros(1, 2, 16)
    with pytest.raises(ValueError, match="block_measures needs tensors of one shape"):
        block_measures(x, x[:, :1])
    with pytest.raises(ValueError, match="block_measures needs a 3-D"):
        block_measures(x[0], x[0])
    with pytest.raises(ValueError, match="magnitudes needs a 3-D"):
        outlier_ratio(x.int())
