"""NVFP4: every code, every tie, and twins that give the reference's bits."""

from __future__ import annotations

import itertools

import pytest
import torch
from sixbit_diffusion.kernels import (
    dequantize_nvfp4,
    hadamard_quantize_nvfp4,
    quantize_nvfp4,
    tile_scales,
    untile_scales,
)
from sixbit_diffusion.kernels.nvfp4 import ROUNDINGS

MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 16), (7, 48), (123, 80), (2, 1920), (1, 3072)]
LARGE = [(1234, 3072), (226, 12288), (1234, 1920)]


def block_with(values: torch.Tensor, amax: float = 6.0) -> torch.Tensor:
    """One block a value: amax first, so that with a global scale of 1 the block's scale is amax / 6."""
    x = torch.zeros(len(values), 16)
    x[:, 0], x[:, 1] = amax, values
    return x


def one(device: str = "cpu") -> torch.Tensor:
    return torch.ones((), device=device)


def test_all_codes_decode_and_the_even_element_is_in_the_high_nibble():
    data = torch.tensor([[0x01, 0x23, 0x45, 0x67, 0x89, 0xAB, 0xCD, 0xEF]], dtype=torch.uint8)
    scale = torch.ones(1, 1).to(torch.float8_e4m3fn)
    values = dequantize_nvfp4(data, scale, torch.tensor(0.5))[0]
    expected = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)]) * 0.5
    assert torch.equal(values, expected)
    assert torch.signbit(values[8])


def test_every_tie_between_values_goes_to_the_even_code():
    ties = [(a + b) / 2 for a, b in itertools.pairwise(MAGNITUDES)]
    to_even = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    assert len(ties) == len(to_even)
    for sign in (1.0, -1.0):
        x = block_with(sign * torch.tensor(ties))
        assert torch.equal(
            dequantize_nvfp4(*quantize_nvfp4(x, global_scale=one()))[:, 1], sign * torch.tensor(to_even)
        )
        for toward, expected in ((torch.inf, MAGNITUDES[1:]), (0.0, MAGNITUDES[:-1])):
            beside = torch.nextafter(torch.tensor(ties), torch.tensor(toward))
            x = block_with(sign * beside)
            got = dequantize_nvfp4(*quantize_nvfp4(x, global_scale=one()))[:, 1]
            assert torch.equal(got, sign * torch.tensor(expected))


def scale_cases() -> torch.Tensor:
    """All E4M3 values, the ties between neighbours, and the numbers on either side of a tie."""
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (values[1:] + values[:-1]) / 2
    return torch.cat([values, ties, torch.nextafter(ties, ties * 2), torch.nextafter(ties, ties * 0)])


def test_every_scale_and_every_tie_between_scales():
    x = torch.zeros(len(scale_cases()), 16)
    x[:, 3] = scale_cases() * 6
    _, scale, _ = quantize_nvfp4(x, global_scale=one())
    wanted = (x[:, 3] / torch.tensor(6.0)).double()  # the division may round; what counts is what came out
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    distance = (values[None, :] - wanted[:, None]).abs()
    nearest = distance == distance.amin(dim=1, keepdim=True)
    tied = nearest.sum(dim=1) > 1
    assert tied.sum() > 100
    even = nearest & (torch.arange(127) % 2 == 0)
    expected = torch.where(tied[:, None], even, nearest).int().argmax(dim=1)
    assert torch.equal(scale.view(torch.uint8)[:, 0].long(), expected)


def test_twin_rounds_every_scale_and_value_alike(device, run_both, assert_same):
    scales = torch.zeros(len(scale_cases()), 16)
    scales[:, 0] = 6.0 * scale_cases()
    steps = torch.arange(-60, 61) / 8  # every value, every tie, saturation
    for x in (scales, block_with(steps), block_with(torch.nextafter(steps, torch.tensor(9.0)))):
        expected, got = run_both(quantize_nvfp4, x.to(device), global_scale=one(device))
        assert_same(expected, got)


def test_all_256_scale_codes_decode_alike(device, run_both, assert_same):
    scale = torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)[:, None]
    data = torch.full((256, 8), 0x7F, dtype=torch.uint8, device=device)
    expected, got = run_both(dequantize_nvfp4, data, scale, one(device))
    assert_same(expected, got)
    assert expected[0].isnan().any(dim=1).sum() == 2
    assert torch.equal(expected[0][:127, 0], 6 * scale.float()[:127, 0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, *(pytest.param(s, marks=pytest.mark.gpu) for s in LARGE)])
def test_twins_equal_reference(device, run_both, assert_same, make, shape, dtype):
    x = make(*shape, dtype=dtype, device=device)
    for per_row in (False, True):
        expected, got = run_both(quantize_nvfp4, x, per_row=per_row)
        assert_same(expected, got)
    decoded, twin = run_both(dequantize_nvfp4, *expected, dtype)
    assert_same(decoded, twin)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_twins_choose_the_same_scales(device, run_both, assert_same, make, rounding):
    """Errors a last bit apart might compare otherwise when summed in another order; here none are."""
    x = make(33, 160, device=device)
    given = (x.abs().amax(dim=1, keepdim=True) / 2000).contiguous()
    for options in ({"per_row": False}, {"per_row": True}, {"global_scale": given}):
        expected, got = run_both(quantize_nvfp4, x, rounding, **options)
        assert_same(expected, got)


def test_search_takes_the_best_of_eight_codes(make):
    x = make(64, 256)
    blocks = x.view(64, 16, 16, 1)
    errors, codes = {}, {}
    for rounding in ROUNDINGS:
        data, scale, global_scale = quantize_nvfp4(x, rounding)
        restored = dequantize_nvfp4(data, scale, global_scale)
        errors[rounding] = (restored - x).view(64, 16, 16).square().sum(-1)
        codes[rounding] = scale.view(torch.uint8).int()
    grid = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)])
    candidates = []
    for offset in range(-3, 5):
        code = (codes["nearest"] + offset).clamp(0, 126).to(torch.uint8)
        total = code.view(torch.float8_e4m3fn).float() * global_scale
        candidates.append((blocks - total[..., None, None] * grid).square().amin(-1).sum(-1))
    torch.testing.assert_close(errors["search"], torch.stack(candidates).amin(0), rtol=1e-5, atol=1e-9)
    assert (errors["search"] <= errors["nearest"] * (1 + 1e-6)).all()
    assert (errors["four-over-six"] <= errors["nearest"] * (1 + 1e-6)).all()


def test_search_reaches_both_ends(device, run_both, assert_same):
    """Two blocks of nearest scale 1, best decoded with 13/16 (three codes below) and 12/8 (four above)."""
    low = [6.0] + [6 * 13 / 16] * 10 + [0.5 * 13 / 16] * 5
    high = [6.0] + [4.5] * 8 + [0.75] * 7
    x = torch.tensor([low, high], device=device)
    expected, got = run_both(quantize_nvfp4, x, "search", global_scale=one(device))
    assert_same(expected, got)
    assert expected[1].float().flatten().tolist() == [13 / 16, 12 / 8]


def test_zeros_outliers_and_tiny_values(device, run_both, assert_same):
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    x[0] = 0.0
    x[1, 3] = 1e6
    x[2] *= 1e-38
    x[3, :16] = -0.0
    for per_row in (False, True):
        expected, got = run_both(quantize_nvfp4, x.to(device), per_row=per_row)
        assert_same(expected, got)
        restored = dequantize_nvfp4(*expected)
        assert restored.isfinite().all() and (restored[0] == 0).all()
        torch.testing.assert_close(restored[1, 3].item(), 1e6, rtol=1e-3, atol=0)
    data, _, global_scale = quantize_nvfp4(torch.zeros(2, 16))
    assert global_scale == 1 and (data == 0).all()


def test_what_is_not_finite_becomes_nan_and_never_a_number(device, run_both, assert_same):
    x = torch.ones(4, 32, device=device)
    x[1, 5], x[2, 20] = torch.inf, torch.nan
    expected, got = run_both(quantize_nvfp4, x, per_row=True)
    assert_same(expected, got)
    assert not expected[1].float().isnan().any()
    assert dequantize_nvfp4(*expected).isnan().all(dim=1).tolist() == [False, True, True, False]
    for rounding in ROUNDINGS:
        expected, got = run_both(quantize_nvfp4, x, rounding)
        assert_same(expected, got)
        assert expected[2].isnan() and not expected[1].float().isnan().any()
    bad = torch.zeros((), device=device)
    expected, got = run_both(quantize_nvfp4, torch.zeros(1, 16, device=device), global_scale=bad)
    assert_same(expected, got)
    assert expected[2].isnan()


def test_strides_do_not_matter(device, run_both, assert_same, make):
    x = make(64, 48, device=device)
    for view in (x.T, x[:, 16:32], x[::2]):
        expected, got = run_both(quantize_nvfp4, view)
        assert_same(expected, got)
        assert_same(quantize_nvfp4(view.contiguous()), expected)
        expected, got = run_both(hadamard_quantize_nvfp4, view, 0)
        assert_same(expected, got)


def test_error_is_that_of_the_format():
    w = torch.randn(256, 512, generator=torch.Generator().manual_seed(0))
    for rounding, most in (("nearest", 0.097), ("four-over-six", 0.089), ("search", 0.085)):
        error = (dequantize_nvfp4(*quantize_nvfp4(w, rounding)) - w).norm() / w.norm()
        assert 0.07 < error < most


@pytest.mark.parametrize("shape", [(1, 1), (128, 4), (130, 5), (226, 192)])
def test_tiled_scales(shape):
    rows, columns = shape
    scale = torch.randint(0, 127, shape, generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    tiled = tile_scales(scale.view(torch.float8_e4m3fn))
    tall, wide = -(-rows // 128) * 128, -(-columns // 4) * 4
    assert tiled.shape == (tall, wide) and tiled.dtype == torch.float8_e4m3fn
    flat = tiled.view(torch.uint8).flatten()
    r, c = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    place = ((r // 128) * (wide // 4) + c // 4) * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4
    assert torch.equal(flat[place], scale)
    assert flat.int().sum() == scale.int().sum()  # the padding is zero
    assert torch.equal(untile_scales(tiled, rows, columns).view(torch.uint8), scale)


def test_wrong_arguments_are_named():
    x = torch.zeros(2, 32)
    data, scale, global_scale = quantize_nvfp4(x)
    for call, message in (
        (lambda: quantize_nvfp4(x[0]), "2-D float16, bfloat16 or float32 tensor, got .32,. float32"),
        (lambda: quantize_nvfp4(x.int()), "got .2, 32. int32"),
        (lambda: quantize_nvfp4(x.double()), "got .2, 32. float64"),
        (lambda: quantize_nvfp4(x[:, :20]), "multiple of 16, got K = 20"),
        (lambda: quantize_nvfp4(x[:0]), "at least one row"),
        (lambda: quantize_nvfp4(x, "rtn"), "one of nearest, four-over-six, search, got 'rtn'"),
        (lambda: quantize_nvfp4(x, global_scale=torch.ones(3, 1)), "global_scale as float32"),
        (lambda: dequantize_nvfp4(data.int(), scale, global_scale), "2-D uint8"),
        (lambda: dequantize_nvfp4(data, scale.float(), global_scale), "row-major float8_e4m3fn .2, 2."),
        (lambda: dequantize_nvfp4(data, tile_scales(scale), global_scale), "got .128, 4."),
        (lambda: dequantize_nvfp4(data, scale, global_scale.double()), "global_scale as float32"),
        (lambda: tile_scales(torch.zeros(2, 2)), "one-byte"),
        (lambda: untile_scales(scale, 2, 2), "needs .128, 4. for 2 x 2 scales"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            call()
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("shape", [(1, 16), (7, 48), (226, 1920)])
def test_agrees_with_comfy_kitchen(shape, make):
    """Bits equal, of values and of tiled scales: the same divisions, roundings and nibble order."""
    pytest.importorskip("comfy_kitchen", reason="comfy-kitchen is not installed")
    import comfy_kitchen

    x = make(*shape)
    x[0, 1], x[0, 2] = -0.0, 1e-30
    data, scale, global_scale = quantize_nvfp4(x)
    with comfy_kitchen.use_backend("eager"):
        their_data, their_scale = comfy_kitchen.quantize_nvfp4(x, global_scale)
        theirs = comfy_kitchen.dequantize_nvfp4(their_data, global_scale, their_scale, torch.float32)
    assert torch.equal(data, their_data)
    assert torch.equal(tile_scales(scale).view(torch.uint8), their_scale.view(torch.uint8))
    assert torch.equal(dequantize_nvfp4(data, scale, global_scale), theirs)
