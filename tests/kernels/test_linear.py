"""The linear layers compute what they say, and their twins agree with them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from sixbit_diffusion.kernels import (
    block_hadamard,
    dequantize_nvfp4,
    hadamard_quantize_int8,
    int8_linear,
    int8_weight,
    linear_w4a4,
    linear_w4a8,
    linear_w4a16,
    quantize_nvfp4,
    use_backend,
)

LINEARS = [linear_w4a16, linear_w4a8, linear_w4a4]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CASES = [(1, 16, 16, 0), (7, 48, 33, 16), (130, 80, 33, 0), (37, 384, 48, 128)]
LARGE = [(1234, 3072, 3072, 128), (1234, 12288, 3072, 128), (226, 1920, 7680, 128)]


@pytest.fixture
def layer(make):
    """(x, weight triple, bias, decoded weight in the basis of x)."""

    def build(rows, columns, out, hadamard, dtype=torch.float32, device="cpu", per_row=False):
        weight = make(out, columns, device=device, seed=1) / columns**0.5
        triple = quantize_nvfp4(block_hadamard(weight, hadamard), "nearest", per_row)
        bias = make(out, device=device, seed=2)
        decoded = block_hadamard(dequantize_nvfp4(*triple), hadamard)
        return make(rows, columns, dtype=dtype, device=device, integers=True), triple, bias, decoded

    return build


@pytest.mark.parametrize("linear, most", [(linear_w4a16, 1e-5), (linear_w4a8, 0.015), (linear_w4a4, 0.11)])
@pytest.mark.parametrize("hadamard", [0, 128])
def test_result_is_the_linear_layer(layer, linear, most, hadamard):
    x, triple, bias, decoded = layer(64, 384, 48, hadamard)
    exact = x.double() @ decoded.double().T + bias.double()
    y = linear(x, *triple, bias, hadamard)
    error = (y - exact).norm() / exact.norm()
    assert error <= most
    without = linear(x, *triple, None, hadamard)
    torch.testing.assert_close(y, without + bias, rtol=0, atol=1e-4)


def test_weights_side_by_side_are_each_by_itself(device, run_both, layer, make):
    x, triple, bias, _ = layer(9, 64, 20, 16, device=device)
    other = quantize_nvfp4(make(33, 64, device=device, seed=5), per_row=True)
    q, row_scale = hadamard_quantize_int8(x, 16)
    cast = int8_weight([triple, other])
    for beside in (torch.cat([bias, bias.new_zeros(33)]), None):
        for (y,) in run_both(int8_linear, q, row_scale, *cast, beside, torch.float16):
            assert y.shape == (9, 53) and y.dtype == torch.float16
            own = bias if beside is not None else None
            assert torch.equal(y[:, :20], linear_w4a8(x, *triple, own, 16).half())
            assert torch.equal(y[:, 20:], linear_w4a8(x, *other, None, 16).half())


def test_formats_rank_by_error(layer):
    x, triple, bias, decoded = layer(64, 384, 48, 128)
    exact = x.double() @ decoded.double().T + bias.double()
    errors = [float((linear(x, *triple, bias, 128) - exact).norm()) for linear in LINEARS]
    assert errors[0] < errors[1] < errors[2]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("linear", LINEARS, ids=lambda op: op.__name__)
@pytest.mark.parametrize("case", [*CASES, *(pytest.param(c, marks=pytest.mark.gpu) for c in LARGE)], ids=str)
def test_twin_agrees(device, run_both, layer, linear, case, dtype):
    """Against the reference of the same numbers in float32, at most twice the error of the reference in the
    input's type, plus the rounding of a float32 sum. x holds whole numbers, so that both quantize alike."""
    x, triple, bias, _ = layer(*case, dtype=dtype, device=device)
    with use_backend("reference"):
        exact = linear(x.float(), *triple, bias, case[3])
    (expected,), (got,) = run_both(linear, x, *triple, bias, case[3])
    worst = (expected.float() - exact).abs().max()
    if linear is linear_w4a16 and dtype != torch.float32:
        # The twin rounds the weight, rotated back, to the type of x, as any layer in that type does.
        weight = block_hadamard(dequantize_nvfp4(*triple), case[3]).to(dtype)
        low = (x @ weight.T).float() + bias
        worst = (low.to(dtype).float() - exact).abs().max()
    # The interpreter truncates bfloat16; tensor cores truncate as they add.
    interpreted = torch.finfo(dtype).eps if dtype == torch.bfloat16 else 1e-6
    unit = interpreted if device == "cpu" else 1e-5
    assert (got.float() - exact).abs().max() <= 2 * worst + unit * exact.abs().max()


@pytest.mark.parametrize("linear", LINEARS, ids=lambda op: op.__name__)
def test_a_rotation_that_float16_cannot_hold(device, run_both, layer, linear):
    """128 equal values of 5,900 become one of 66,751, above the largest float16; the result is within it."""
    _, triple, bias, decoded = layer(4, 256, 48, 128, device=device)
    x = torch.full((4, 256), 5900.0, dtype=torch.float16, device=device)
    exact = x.float() @ decoded.T + bias
    assert exact.abs().max() < 65504
    for (result,) in run_both(linear, x, *triple, bias, 128):
        assert result.isfinite().all()
        torch.testing.assert_close(result.float(), exact, rtol=0, atol=0.02 * float(exact.abs().max()))


@pytest.mark.parametrize("linear", [linear_w4a8, linear_w4a4], ids=lambda op: op.__name__)
def test_twin_with_row_scales_and_no_bias(device, run_both, layer, linear):
    x, triple, _, _ = layer(9, 64, 20, 16, device=device, per_row=True)
    (expected,), (got,) = run_both(linear, x, *triple, None, 16)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_int8_twin_has_the_same_bits_where_sums_are_exact(device, run_both, assert_same, layer):
    """Below 1,040 columns the reference's float32 sums of INT8 products are exact, like the twin's int32."""
    x, triple, bias, _ = layer(37, 384, 48, 128, device=device)
    assert_same(*run_both(linear_w4a8, x, *triple, bias, 128))


@pytest.mark.parametrize("linear", LINEARS, ids=lambda op: op.__name__)
def test_what_is_not_finite_stays_in_its_row(device, run_both, layer, linear):
    x, triple, bias, _ = layer(4, 32, 16, 16, device=device)
    x[1, 3], x[2, 5] = torch.nan, torch.inf
    for (result,) in run_both(linear, x, *triple, bias, 16):
        assert result.isfinite().all(dim=1).tolist() == [True, False, False, True]
        assert not result[1:3].isfinite().any()


@pytest.mark.parametrize("linear", LINEARS, ids=lambda op: op.__name__)
def test_rows_do_not_depend_on_each_other(layer, linear):
    x, triple, bias, _ = layer(8, 128, 16, 128)
    together = linear(x, *triple, bias, 128)
    apart = torch.cat([linear(row[None], *triple, bias, 128) for row in x])
    torch.testing.assert_close(together, apart, rtol=0, atol=1e-6 * float(together.abs().max()))


@pytest.mark.parametrize(  # rows of 1088 bytes, which a descriptor takes, and of 1080, which none does
    "shape", [(1300, 80, 272), (1300, 80, 270), pytest.param((5000, 3072, 3100), marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("descriptors", [False, True])
def test_int8_product_of_many_tiles_is_exact(monkeypatch, device, descriptors, with_bias, shape):
    from sixbit_diffusion.kernels import gemm_triton

    if descriptors and device == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("this GPU has no unit for tensor descriptors")
    tile = gemm_triton.SMALL_GEMM_TILE
    if device == "cuda":
        tile = gemm_triton.gemm_tile(torch.cuda.get_device_capability(), torch.int8 if descriptors else None)
    tile = replace(tile, descriptors=descriptors)
    monkeypatch.setattr(gemm_triton, "gemm_tile", lambda capability, dtype: tile)

    rows, depth, columns = shape
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(-127, 128, (rows, depth), dtype=torch.int8, generator=generator)
    b = torch.randint(-127, 128, (columns, depth), dtype=torch.int8, generator=generator)
    row_scale = torch.rand(rows, 1, generator=generator)
    column_scale = torch.rand(columns, 1, generator=generator)
    bias = torch.randn(columns, generator=generator) if with_bias else None
    # Every sum is a whole number below 2**26: exact in float64, and as int32.
    sums = (a.to(device).double() @ b.to(device).double().T).int().cpu()
    expected = sums.float() * row_scale * column_scale.T
    expected = expected if bias is None else expected + bias
    arguments = [None if t is None else t.to(device) for t in (a, b, row_scale, column_scale, bias)]
    assert torch.equal(gemm_triton.scaled_gemm(*arguments, torch.float32).cpu(), expected)


def test_fp4_kernel_interpreted(monkeypatch, device, layer, make):
    """The kernel for FP4 units, against the reference. The interpreter is given a decoder of E4M3 scales: it
    reads every scale as a power of two (Triton 3.9)."""
    from sixbit_diffusion.kernels import hadamard_quantize_nvfp4
    from sixbit_diffusion.kernels.gemm_triton import fp4_gemm, has_fp4

    if device == "cuda" and not has_fp4(torch.cuda.get_device_capability()):
        pytest.skip("this GPU has no FP4 units, and no twin asks it for their kernel")
    if device == "cpu":
        interpreter = pytest.importorskip("triton.runtime.interpreter")
        if not hasattr(interpreter, "_dot_scaled_scale_to_f32"):
            pytest.skip("this Triton does not interpret dot_scaled")

        def decode(scale, _compute_type):
            return torch.from_numpy(scale.data.copy()).view(torch.float8_e4m3fn).float().numpy()

        monkeypatch.setattr(interpreter, "_dot_scaled_scale_to_f32", decode)

    for rows, columns, out in ((37, 384, 48), (130, 80, 140)):
        x, (data, scale, global_scale), bias, _ = layer(rows, columns, out, 0, device=device)
        x_data, x_scale, row_scale = hadamard_quantize_nvfp4(x, 0)
        y = fp4_gemm(x_data, x_scale, data, scale, row_scale, global_scale, bias, torch.float32)
        torch.testing.assert_close(y, linear_w4a4(x, data, scale, global_scale, bias), rtol=1e-4, atol=1e-4)


def test_wrong_arguments_are_named(layer):
    x, (data, scale, global_scale), bias, _ = layer(4, 32, 16, 0)
    for arguments, message in (
        ((x[:, :16], data, scale, global_scale), "x with 32 columns, as the weight has, got .4, 16."),
        ((x[None], data, scale, global_scale), "2-D"),
        ((x, data, scale, global_scale, bias[:5]), "bias as a float tensor .16,., got .5,. float32"),
        ((x, data, scale, global_scale, bias.int()), "bias"),
        ((x, data, scale, global_scale, None, 64), "power of two that divides K = 32"),
        ((x, data, scale.float(), global_scale), "float8_e4m3fn"),
    ):
        for linear in LINEARS:
            with pytest.raises(ValueError, match=message) as error:
                linear(*arguments)
            assert str(error.value).startswith(linear.__name__)

    q, row_scale = hadamard_quantize_int8(x, 16)
    channels, channel_scale = int8_weight([(data, scale, global_scale)])
    for arguments, message in (
        ((x, row_scale, channels, channel_scale, None), "q as a 2-D int8 tensor, got .4, 32. float32"),
        ((q, row_scale[:2], channels, channel_scale, None), "scale of q as float32 .4, 1., got .2, 1."),
        ((q, row_scale, channels.float(), channel_scale, None), "channels as a 2-D int8 tensor"),
        (
            (q, row_scale, channels, channel_scale.T, None),
            "scale of channels as float32 .16, 1., got .1, 16",
        ),
        ((q[:, :16], row_scale, channels, channel_scale, None), "q with 32 columns"),
        ((q, row_scale, channels, channel_scale, bias[:5]), "bias as a float tensor .16,., got .5,."),
    ):
        with pytest.raises(ValueError, match=message) as error:
            int8_linear(*arguments, torch.float32)
        assert str(error.value).startswith("int8_linear")
