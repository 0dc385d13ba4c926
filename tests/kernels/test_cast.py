"""Casting a weight to INT8: one scale per output channel, into a buffer if one is given."""

from __future__ import annotations

import pytest
import torch
from sixbit_diffusion.kernels import cast_nvfp4_to_int8, dequantize_nvfp4, quantize_nvfp4

SHAPES = [(1, 16), (7, 48), (123, 80), (3, 1920)]
LARGE = [(3072, 3072), (3072, 12288)]


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES, *(pytest.param(s, marks=pytest.mark.gpu) for s in LARGE)])
def test_twin_equals_reference(device, run_both, assert_same, make, shape, per_row):
    weight = quantize_nvfp4(make(*shape, device=device), per_row=per_row)
    assert_same(*run_both(cast_nvfp4_to_int8, *weight))


def test_error_is_half_a_step_and_the_channel_is_filled(make):
    weight = quantize_nvfp4(make(32, 128))
    q, scale = cast_nvfp4_to_int8(*weight)
    decoded = dequantize_nvfp4(*weight)
    assert ((q * scale - decoded).abs() <= scale * 0.5001).all()
    assert (q.abs().amax(dim=1) == 127).all()


def test_a_cast_adds_almost_no_error():
    """Relative error of a Gaussian weight, decoded and cast: the figures of `kernels/cast.py`."""
    weight = torch.randn(256, 1920, generator=torch.Generator().manual_seed(0))
    quantized = quantize_nvfp4(weight, "search")
    q, scale = cast_nvfp4_to_int8(*quantized)
    decoded, cast = ((w - weight).norm() / weight.norm() for w in (dequantize_nvfp4(*quantized), q * scale))
    assert float(decoded) == pytest.approx(0.0835, abs=1e-4)
    assert float(cast) == pytest.approx(0.0840, abs=1e-4)


def test_zero_and_not_finite_channels(device, run_both, assert_same, make):
    data, scale, global_scale = quantize_nvfp4(make(4, 32, device=device), per_row=True)
    data[0] = 0
    global_scale[1] = torch.nan
    scale.view(torch.uint8)[2, 1] = 0x7F
    expected, got = run_both(cast_nvfp4_to_int8, data, scale, global_scale)
    assert_same(expected, got)
    assert expected[1][0] == 1
    assert expected[1].isnan().flatten().tolist() == [False, True, True, False]


def test_writes_into_the_buffer(device, run_both, assert_same, make):
    weight = quantize_nvfp4(make(5, 32, device=device))
    buffer = torch.full((5, 32), 99, dtype=torch.int8, device=device)
    expected, got = run_both(cast_nvfp4_to_int8, *weight, out=buffer)
    assert got[0] is buffer and expected[0] is buffer
    assert_same(cast_nvfp4_to_int8(*weight), got)
    with pytest.raises(ValueError, match=r"out as contiguous int8 \(5, 32\), got \(5, 16\) int8"):
        cast_nvfp4_to_int8(*weight, out=buffer[:, :16])
