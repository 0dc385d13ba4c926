"""The 16-bit passes of a GPU without Triton against the references, on the CPU, where each runs too."""

from __future__ import annotations

import pytest
import torch
from sixbit_diffusion.kernels import (
    block_hadamard,
    dequantize_nvfp4,
    gate_residual,
    gelu_int8,
    hadamard_quantize_int8,
    linear_torch,
    magnitudes,
    norm_modulate,
    norm_modulate_int8,
    quantize_int8,
    quantize_nvfp4,
    use_backend,
)
from sixbit_diffusion.kernels import decode_torch as decode

HALVES = [torch.bfloat16, torch.float16]


def both(op, *args):
    found = []
    for backend in ("reference", "half"):
        with use_backend(backend):
            found.append(op(*args))
    return found


def assert_rows_agree(got, expected, exact):
    """No code more than a step away, and at most one rounding to 16 bits further from the exact rows."""
    (q, scale), (expected_q, expected_scale) = got[:2], expected[:2]
    assert q.dtype == torch.int8 and scale.dtype == torch.float32
    torch.testing.assert_close(scale, expected_scale, rtol=2**-7, atol=0)
    assert (q.int() - expected_q.int()).abs().max() <= 1
    size = exact.norm(dim=1)
    error, before = ((codes * by - exact).norm(dim=1) / size for codes, by in ((q, scale), expected[:2]))
    assert (error <= 1.1 * before + 2**-9).all()
    for found, wanted in zip(got[2:], expected[2:], strict=True):
        torch.testing.assert_close(found, wanted, rtol=2**-7, atol=0)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("rows", "width", "block"), [(5, 96, 1), (7, 96, 32), (3, 384, 128), (1, 16, 16)])
def test_rows_are_quantized_as_by_the_reference(make, monkeypatch, rows, width, block, dtype):
    x = make(rows, width, dtype=dtype)
    exact = block_hadamard(x.float(), block)
    expected, got = both(hadamard_quantize_int8, x, block)
    assert_rows_agree(got, expected, exact)
    monkeypatch.setattr(decode, "VALUES", width)  # a row at a time
    for whole, piece in zip(got, both(hadamard_quantize_int8, x, block)[1], strict=True):
        assert torch.equal(whole, piece)
    if block == 1:
        assert_rows_agree(both(quantize_int8, x)[1], expected, exact)


def test_float16_holds_the_rotation_of_its_largest_values():
    x = torch.full((2, 128), 60000.0, dtype=torch.float16)
    q, scale = both(hadamard_quantize_int8, x, 128)[1]
    torch.testing.assert_close(q[:, 0] * scale[:, 0], torch.full((2,), 60000 * 128**0.5), rtol=1e-3, atol=0)
    assert not q[:, 1:].any()


@pytest.mark.parametrize("size", [1e-5, 2e-6])
def test_float16_keeps_the_smallest_values(make, size):
    x = (make(6, 256) * size).half()
    expected, got = both(hadamard_quantize_int8, x, 128)
    assert_rows_agree(got, expected, block_hadamard(x.float(), 128))


def test_zeros_and_what_is_not_finite():
    x = torch.ones(4, 32, dtype=torch.bfloat16)
    x[0], x[1, 3], x[2, 5] = 0, torch.inf, torch.nan
    for block in (1, 16):
        q, scale = both(hadamard_quantize_int8, x, block)[1]
        assert scale.isnan().flatten().tolist() == [False, True, True, False]
        assert not q[0].any() and scale[0] == 1


@pytest.mark.parametrize("dtype", HALVES)
def test_gelu(make, dtype):
    x = make(2, 9, 64, dtype=dtype)
    exact = torch.nn.functional.gelu(x.float(), approximate="tanh").flatten(0, 1)
    expected, got = both(gelu_int8, x, 32, True)
    assert_rows_agree(got, expected, block_hadamard(exact, 32))
    place = torch.zeros(20, 64, dtype=torch.int8), torch.zeros(20, 1)
    given = both(gelu_int8, x, 32, False, (place[0][1:19], place[1][1:19]))[1]
    assert len(given) == 2 and all(torch.equal(a, b) for a, b in zip(given, got, strict=False))
    assert torch.equal(place[0][1:19], got[0]) and not place[1][0] and not place[1][19]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("words", [0, 3])
def test_norm_and_gate(make, dtype, affine, words):
    text, video = make(2, words, 64, dtype=dtype), make(2, 7, 64, dtype=dtype, seed=1)
    weight, bias = (make(64, seed=2), make(64, seed=3)) if affine else (None, None)
    scale, shift, gate = (make(2, 2, 64, dtype=dtype, seed=n) for n in (4, 5, 6))
    given = (text, video, weight, bias, 1e-5, scale, shift)
    with use_backend("reference"):
        exact = norm_modulate(*(a.float() if torch.is_tensor(a) else a for a in given))
    expected, got = both(norm_modulate, *given)
    assert got.dtype == dtype and got.shape == expected.shape
    assert (got - exact).norm() <= 2 * (expected - exact).norm()
    expected, got = both(norm_modulate_int8, *given, 32, True)
    assert_rows_agree(got, expected, block_hadamard(exact.flatten(0, 1), 32))

    y = make(2, words + 7, 64, dtype=dtype, seed=7)
    for before, after in zip(*both(gate_residual, text, video, y, gate), strict=True):
        torch.testing.assert_close(after, before, rtol=torch.finfo(dtype).eps, atol=1e-6)
    assert gate_residual.select(text, video, y.float(), gate) == "reference"
    with use_backend("half"):
        made, places = gate_residual(text, video, y, gate), (text.clone(), video.clone())
        written = gate_residual(*places, y, gate, places)
    assert all(w is p and torch.equal(w, m) for w, p, m in zip(written, places, made, strict=True))


@pytest.mark.parametrize("dtype", HALVES)
def test_magnitudes(make, dtype):
    expected, got = both(magnitudes, make(3, 50, 40, dtype=dtype))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("per_row", [True, False])
@pytest.mark.parametrize("block", [0, 32])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_weights_decoded_in_sixteen_bits(make, dtype, per_row, block, device):
    """On a GPU too, where a tensor without axes is taken in 16 bits: the global scale must not be."""
    weight = quantize_nvfp4(make(24, 64, device=device) * 0.02, per_row=per_row)
    exact = block_hadamard(dequantize_nvfp4(*weight), block)
    got = decode.decode_weight(*weight, dtype, block)
    once = (exact.to(dtype).float() - exact).norm()
    assert got.dtype == dtype and (got - exact).norm() <= (3 if block else 1.5) * once


def test_they_serve_where_a_gpu_has_no_triton(make, monkeypatch):
    x = make(4, 32, dtype=torch.bfloat16)
    assert quantize_int8.select(x) == "reference"
    monkeypatch.setattr(linear_torch, "int8_product", lambda x: "half")
    assert quantize_int8.select(x) == "half" and quantize_int8.select(x.float()) == "reference"
