"""INT8 rows: half a step of error, defined edges, and a twin that gives the reference's bits."""

from __future__ import annotations

import pytest
import torch
from sixbit_diffusion.kernels import hadamard_quantize_int8, quantize_int8, use_backend

SHAPES = [(1, 1), (7, 123), (123, 48), (2, 1920), (1, 3072)]
LARGE = [(1234, 3072), (226, 12288), (4444, 3072)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [*SHAPES, *(pytest.param(s, marks=pytest.mark.gpu) for s in LARGE)])
def test_twin_equals_reference(device, run_both, assert_same, make, shape, dtype):
    expected, got = run_both(quantize_int8, make(*shape, dtype=dtype, device=device))
    assert_same(expected, got)


def test_every_tie_rounds_to_even(device, run_both, assert_same):
    halves = torch.arange(-127, 127) + 0.5
    x = torch.stack([torch.full_like(halves, 127.0), halves], dim=1)  # scale 1
    (q, scale), got = run_both(quantize_int8, x.to(device))
    assert_same((q, scale), got)
    assert (scale == 1).all() and (q[:, 1] % 2 == 0).all()
    assert ((q[:, 1].cpu() - halves).abs() == 0.5).all()


def test_round_trip_error_is_half_a_step(make):
    x = make(64, 256)
    q, scale = quantize_int8(x)
    assert ((q * scale - x).abs() <= scale * 0.5001).all()
    assert (q.abs().amax(dim=1) == 127).all()


def test_edges(device, run_both, assert_same):
    x = torch.ones(6, 40)
    x[0], x[1], x[2, 7] = 0.0, 1e-45, 1e30
    x[3, 1], x[4, 2], x[5, 39] = torch.inf, torch.nan, -torch.inf
    (q, scale), (got_q, got_scale) = run_both(quantize_int8, x.to(device))
    assert_same((q[:3], scale[:3]), (got_q[:3], got_scale[:3]))
    assert scale[0] == 1 and scale[1] == 1 and (q[:2] == 0).all()
    assert q[2, 7] == 127 and q[2].abs().sum() == 127
    assert scale[3:].isnan().all() and got_scale[3:].isnan().all()  # codes beside them mean nothing
    for _, scale in run_both(hadamard_quantize_int8, x[[0, 3, 4, 5]].to(device), 8):
        assert scale.isnan().flatten().tolist() == [False, True, True, True]


def test_strides_do_not_matter(device, run_both, assert_same, make):
    x = make(64, 48, device=device)
    for view in (x.T, x[:, 3:21], x[::2]):
        expected, got = run_both(quantize_int8, view)
        assert_same(expected, got)
        assert_same(quantize_int8(view.contiguous()), expected)


@pytest.mark.gpu
def test_more_elements_than_int32_counts():
    rows, columns = 720_000, 3072
    if torch.cuda.mem_get_info()[0] < 4 * rows * columns:
        pytest.skip("needs 9 GB of free GPU memory")
    x = torch.zeros(rows, columns, dtype=torch.bfloat16, device="cuda")
    x[-1] = torch.arange(columns, device="cuda") / 7
    q, scale = quantize_int8(x)
    with use_backend("reference"):
        expected, expected_scale = quantize_int8(x[-1:])
    assert torch.equal(q[-1:], expected) and torch.equal(scale[-1:], expected_scale)
    assert not q[-2].any()


def test_no_rows(device, run_both, assert_same):
    assert_same(*run_both(quantize_int8, torch.zeros(0, 16, device=device)))


def test_wrong_arguments_are_named():
    for x in (torch.zeros(2, 3, 4), torch.zeros(4), torch.zeros(2, 3, dtype=torch.int32)):
        with pytest.raises(
            ValueError, match="quantize_int8 needs a 2-D float16, bfloat16 or float32 tensor, got"
        ):
            quantize_int8(x)
