"""What stands between a block's products: known formulas, and twins as good as the references."""

from __future__ import annotations

import pytest
import torch
from sixbit_diffusion.kernels import (
    block_hadamard,
    gate_residual,
    gelu_int8,
    hadamard_quantize_int8,
    norm_modulate,
    norm_modulate_int8,
    outlier_ratio,
    ratio_of,
    use_backend,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def streams(make):
    """(text, video, weight, bias, eps, scale, shift) of a block."""

    def build(batch, text, video, width, dtype=torch.float32, device="cpu", affine=True):
        def vector(seed):
            return make(width, dtype=dtype, device=device, seed=seed) if affine else None

        return (
            make(batch, text, width, dtype=dtype, device=device, seed=1),
            make(batch, video, width, dtype=dtype, device=device, seed=2),
            vector(3),
            vector(4),
            1e-5,
            make(batch, 2, width, dtype=dtype, device=device, seed=5),
            make(batch, 2, width, dtype=dtype, device=device, seed=6),
        )

    return build


def test_norm_modulate_is_layer_norm_modulated_by_stream(streams):
    text, video, weight, bias, eps, scale, shift = streams(2, 3, 5, 48)
    y = norm_modulate(text, video, weight, bias, eps, scale, shift)
    norm = torch.nn.LayerNorm(48, eps=eps)
    norm.load_state_dict({"weight": weight, "bias": bias})
    for part, tokens, stream in ((video, slice(3, None), 0), (text, slice(0, 3), 1)):
        expected = norm(part) * (1 + scale[:, None, stream]) + shift[:, None, stream]
        torch.testing.assert_close(y[:, tokens], expected, rtol=1e-5, atol=1e-5)


def test_gate_residual_moves_each_stream_by_its_gate(make):
    text, video = make(2, 3, 8), make(2, 5, 8, seed=1)
    y, gate = make(2, 8, 8, seed=2), make(2, 2, 8, seed=3)
    new_text, new_video = gate_residual(text, video, y, gate)
    torch.testing.assert_close(new_text, text + gate[:, 1:] * y[:, :3])
    torch.testing.assert_close(new_video, video + gate[:, :1] * y[:, 3:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [0, 16])
def test_forms_that_quantize_are_the_two_steps(streams, make, dtype, block):
    arguments = streams(2, 3, 5, 48, dtype=dtype)
    y = norm_modulate(*arguments)
    q, scale, found = norm_modulate_int8(*arguments, block, outliers=True)
    expected_q, expected_scale = hadamard_quantize_int8(y.flatten(0, 1), block)
    assert torch.equal(q, expected_q) and torch.equal(scale, expected_scale)
    assert torch.equal(ratio_of([found]), outlier_ratio(y))
    assert len(norm_modulate_int8(*arguments, block)) == 2

    x = make(2, 5, 48, dtype=dtype)
    y = torch.nn.functional.gelu(x, approximate="tanh")
    q, scale, found = gelu_int8(x, block, outliers=True)
    expected_q, expected_scale = hadamard_quantize_int8(y.flatten(0, 1), block)
    assert torch.equal(q, expected_q) and torch.equal(scale, expected_scale)
    assert torch.equal(ratio_of([found]), outlier_ratio(y))
    assert len(gelu_int8(x, block)) == 2


CASES = [
    (2, 3, 5, 48, 16),
    (1, 0, 9, 64, 64),
    (2, 5, 7, 256, 128),
    (1, 3, 2, 1920, 128),
    (1, 1, 6, 3072, 128),
]
LARGE = [(2, 226, 1777, 3072, 128), (2, 226, 1351, 1920, 128), (2, 0, 4500, 256, 128), (1, 3, 5000, 48, 16)]
WIDE = [(2, 7, 256, 128), (1, 3, 12288, 128), (2, 2, 7680, 128), (1, 9, 123, 0)]
WIDE_LARGE = [(2, 1777, 12288, 128), (2, 1777, 7680, 128), (1, 9000, 256, 128)]


def gpu(cases):
    return [pytest.param(case, marks=pytest.mark.gpu) for case in cases]


@pytest.fixture
def assert_codes_agree(device):
    """INT8 rows of nearly the same numbers: no code more than a step away, few at all; every row near the
    exact one. More may differ where the interpreter truncates bfloat16."""

    def check(got, expected, exact, dtype, most=0.01):
        truncated = device == "cpu" and dtype == torch.bfloat16
        compare(got, expected, exact, *((0.4, 5e-3, 2**-6) if truncated else (most, 1e-3, 1e-3)))

    return check


def compare(got, expected, exact, most, slack, ratio_slack):
    (q, scale), (expected_q, expected_scale) = got[:2], expected[:2]
    torch.testing.assert_close(scale, expected_scale, rtol=0.01, atol=0)
    assert (q.int() - expected_q.int()).abs().max() <= 1
    assert (q != expected_q).float().mean() <= most
    size = exact.double().norm(dim=1)
    error = (q.double() * scale - exact).norm(dim=1) / size
    expected_error = (expected_q.double() * expected_scale - exact).norm(dim=1) / size
    assert (error <= 1.1 * expected_error + slack).all()
    for found, magnitudes in zip(got[2:], expected[2:], strict=True):
        torch.testing.assert_close(found, magnitudes, rtol=ratio_slack, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [*CASES, *gpu(LARGE)], ids=str)
def test_twin_normalizes(device, run_both, assert_codes_agree, streams, case, dtype):
    """Against float32 of the same numbers, at most twice the reference's error and one rounding."""
    *shape, block = case
    for affine in (True, False):
        arguments = streams(*shape, dtype=dtype, device=device, affine=affine)
        with use_backend("reference"):
            exact = norm_modulate(*(a.double().float() if torch.is_tensor(a) else a for a in arguments))
        (expected,), (got,) = run_both(norm_modulate, *arguments)
        worst = (expected.float() - exact).abs().max()
        unit = max(torch.finfo(dtype).eps, 1e-6) if device == "cpu" else 1e-5
        assert (got.float() - exact).abs().max() <= 2 * worst + unit * exact.abs().max()

        for outliers in (False, True):
            expected, got = run_both(norm_modulate_int8, *arguments, block, outliers)
            rotated = block_hadamard(exact.flatten(0, 1), block)
            assert_codes_agree(got, expected, rotated, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [*WIDE, *gpu(WIDE_LARGE)], ids=str)
def test_twin_of_gelu(device, run_both, assert_codes_agree, make, case, dtype):
    batch, tokens, width, block = case
    x = make(batch, tokens, width, dtype=dtype, device=device)
    exact = torch.nn.functional.gelu(x.float(), approximate="tanh").flatten(0, 1)
    for outliers in (False, True):
        expected, got = run_both(gelu_int8, x, block, outliers)
        # Where it is compiled tanh is approximate, to one part in 2,000.
        assert_codes_agree(got, expected, block_hadamard(exact, block), dtype, 0.2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_twin_of_gelu_in_three_parts(device, run_both, assert_codes_agree, make, monkeypatch, dtype):
    """As on Hopper where outliers are measured; rows that are no multiple of those of a tile."""
    from sixbit_diffusion.kernels import row_tiles, rows_triton

    monkeypatch.setattr(rows_triton, "capability_of", lambda x: (9, 0))
    assert row_tiles.row_tile(768, dtype, row_tiles.GELU, (9, 0), 128, True).parts == 3
    x = make(2, 19, 768, dtype=dtype, device=device)
    exact = torch.nn.functional.gelu(x.float(), approximate="tanh").flatten(0, 1)
    expected, got = run_both(gelu_int8, x, 128, True)
    assert_codes_agree(got, expected, block_hadamard(exact, 128), dtype, 0.2)
    x[1, 3, 700] = torch.nan
    assert run_both(gelu_int8, x, 128, True)[1][2].isnan().any(1).tolist() == [False, True]


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_gelu_into_given_tensors(device, make, backend):
    x = make(2, 5, 256, device=device)
    whole = torch.zeros(16, 256, dtype=torch.int8, device=device), torch.zeros(16, 1, device=device)
    with use_backend(backend):
        expected = gelu_int8(x, 64, True)
        found = gelu_int8(x, 64, True, (whole[0][3:13], whole[1][3:13]))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert torch.equal(whole[0][3:13], expected[0]) and torch.equal(whole[1][3:13], expected[1])
    assert not whole[0][:3].any() and not whole[0][13:].any()
    with pytest.raises(ValueError, match=r"gelu_int8 needs out as contiguous torch.int8 \(10, 256\), got"):
        gelu_int8(x, 64, out=whole)
    with use_backend(backend), pytest.raises(ValueError, match="two tensors, q and its scale, got 1"):
        gelu_int8(x, 64, out=(whole[0][3:13],))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [*CASES, *gpu(LARGE)], ids=str)
def test_twin_adds_by_gate(device, run_both, make, case, dtype):
    batch, text, video, width, _ = case
    arguments = (
        make(batch, text, width, dtype=dtype, device=device),
        make(batch, video, width, dtype=dtype, device=device, seed=1),
        make(batch, text + video, width, dtype=dtype, device=device, seed=2),
        make(batch, 2, width, device=device, seed=3),
    )
    with use_backend("reference"):
        exact = gate_residual(*(a.float() for a in arguments))
    expected, got = run_both(gate_residual, *arguments)
    for want, a, b in zip(exact, expected, got, strict=True):
        if want.numel():
            unit = max(torch.finfo(dtype).eps, 1e-6) if device == "cpu" else 1e-6
            assert (b - want).abs().max() <= 2 * (a - want).abs().max() + unit * want.abs().max()
    assert got[1].data_ptr() != arguments[1].data_ptr()
    places = tuple(torch.full_like(stream, torch.nan) for stream in arguments[:2])
    for backend in ("reference", "triton"):  # into places of their own, then in place
        with use_backend(backend):
            made = gate_residual(*arguments)
            for out in (places, tuple(stream.clone() for stream in arguments[:2])):
                streams = arguments[:2] if out is places else out
                written = gate_residual(*streams, *arguments[2:], out)
                assert all(w is o and torch.equal(w, m) for w, o, m in zip(written, out, made, strict=True))


def test_modulation_may_be_slices(device, run_both, streams, make):
    """As the chunks of one product are: (B, 2, D) out of (B, 6 D)."""
    text, video, weight, bias, eps, _, _ = streams(2, 3, 5, 64, device=device)
    shift, scale, gate = make(2, 6 * 64, device=device).view(2, 2, 3, 64).unbind(2)
    assert not scale.is_contiguous()
    (expected,), (got,) = run_both(norm_modulate, text, video, weight, bias, eps, scale, shift)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    expected, got = run_both(gate_residual, text, video, expected, gate)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_what_is_not_finite_stays_in_its_row(device, run_both, streams, make):
    arguments = streams(1, 2, 4, 64, device=device)
    arguments[1][0, 1, 7], arguments[1][0, 2, 9] = torch.nan, torch.inf
    for _, scale, found in run_both(norm_modulate_int8, *arguments, 64, True):
        assert scale.isnan().flatten().tolist() == [False, False, False, True, True, False]
        assert ratio_of([found]).isnan().all()
    x = make(2, 4, 64, device=device)
    x[0, 1, 7], x[0, 2, 9] = torch.nan, torch.inf
    for _, scale, found in run_both(gelu_int8, x, 64, True):
        assert scale.isnan().flatten().tolist() == [False, True, True, False] + [False] * 4
        assert ratio_of([found]).isnan().tolist() == [True, False]


def test_wrong_arguments_are_named(streams, make):
    text, video, weight, bias, eps, scale, shift = streams(2, 3, 5, 48)
    y, gate = make(2, 8, 48), make(2, 2, 48)
    rest = (weight, bias, eps, scale, shift)
    plain = (text, video, None, None, eps, scale, shift)
    for call, message in (
        (
            lambda: norm_modulate(text[:1], video, weight, bias, eps, scale, shift),
            "text as float32 .2, 'T', 48.",
        ),
        (
            lambda: norm_modulate(text.half(), video, weight, bias, eps, scale, shift),
            "got .2, 3, 48. float16",
        ),
        (lambda: norm_modulate(text[0], video[0], *rest), "3-D"),
        (lambda: norm_modulate(text, video, weight[:4], bias, eps, scale, shift), "weight as a float"),
        (lambda: norm_modulate(text, video, None, bias[:4], eps, scale, shift), "bias as a float"),
        (lambda: norm_modulate(text, video, weight, bias, eps, scale[:, 0], shift), "scale as a float"),
        (lambda: norm_modulate(text, video, weight, bias, eps, scale, shift.int()), "shift as a float"),
        (
            lambda: norm_modulate_int8(*plain, 32),
            "norm_modulate_int8 .*K = 48",
        ),
        (lambda: gelu_int8(video[0], 16), "gelu_int8 needs a 3-D"),
        (lambda: gelu_int8(video, 3), "gelu_int8 needs a power of two"),
        (
            lambda: gate_residual(text, video, y[:, 1:], gate),
            "gate_residual needs y as a float .*8, 48.",
        ),
        (
            lambda: gate_residual(text, video, y, gate[:1]),
            "gate_residual needs gate as a float .*2, 48.",
        ),
        (
            lambda: gate_residual(text, video, y, gate, (text, video.mT)),
            "gate_residual needs out as contiguous tensors like its streams",
        ),
    ):
        with pytest.raises(ValueError, match=message) as error:
            call()
        assert "\n" not in str(error.value)
