"""The rotation is orthonormal and its own inverse; fused with quantization it gives the same numbers."""

from __future__ import annotations

import pytest
import torch
from sixbit_diffusion.kernels import (
    block_hadamard,
    hadamard_block_size,
    hadamard_quantize_int8,
    hadamard_quantize_nvfp4,
    quantize_int8,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CASES = [(1, 128, 128), (7, 48, 16), (37, 80, 16), (3, 1920, 128), (20, 256, 64), (5, 96, 2)]
LARGE = [(1234, 3072, 128), (226, 12288, 128), (1234, 1920, 128)]
SIZES = [*CASES, *(pytest.param(*c, marks=pytest.mark.gpu) for c in LARGE)]


@pytest.mark.parametrize(
    "columns, block",
    [(3072, 128), (12288, 128), (1920, 128), (384, 128), (48, 16), (80, 16), (123, 1), (2, 2)],
)
def test_block_size(columns, block):
    assert hadamard_block_size(columns) == block


@pytest.mark.parametrize("block", [2, 4, 8, 16, 32, 64, 128])
def test_orthonormal_symmetric_and_in_blocks(block):
    matrix = block_hadamard(torch.eye(2 * block), block)
    identity = torch.eye(2 * block)
    assert torch.equal(matrix, matrix.T)
    torch.testing.assert_close(matrix @ matrix, identity, rtol=0, atol=1e-6)
    assert (matrix[:block, block:] == 0).all()
    assert torch.allclose(matrix[:block, :block].abs(), torch.full((), block**-0.5))
    assert (matrix[0, :block] > 0).all()


def test_rotating_both_sides_leaves_the_product(make):
    x, w = make(5, 256), make(7, 256, seed=1)
    product = block_hadamard(x, 128) @ block_hadamard(w, 128).T
    torch.testing.assert_close(product, x @ w.T, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, columns, block", SIZES)
def test_twin_rotates_as_well_as_float32(device, run_both, make, rows, columns, block, dtype):
    """Sums may differ in order: against float64, at most twice the reference's error, plus one epsilon."""
    x = make(rows, columns, dtype=dtype, device=device)
    (expected,), (got,) = run_both(block_hadamard, x, block)
    matrix = block_hadamard(torch.eye(block, device=device), block).sign().double() * block**-0.5
    exact = (x.double().view(rows, -1, block) @ matrix).view(rows, columns)
    worst = (expected.double() - exact).abs().max()
    # The interpreter truncates bfloat16.
    unit = torch.finfo(dtype if device == "cpu" else torch.float32).eps * exact.abs().max()
    assert (got.double() - exact).abs().max() <= 2 * worst + unit


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, columns, block", [*SIZES, (4, 48, 0), (4, 48, 1)])
def test_fused_quantization_of_exact_sums_has_the_same_bits(
    device, run_both, assert_same, make, rows, columns, block, dtype
):
    x = make(rows, columns, dtype=dtype, device=device, integers=True)
    assert_same(*run_both(hadamard_quantize_int8, x, block))
    assert_same(*run_both(hadamard_quantize_nvfp4, x, block))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows, columns", [(9, 384), (5, 768), (3, 3072), (5, 96), (7, 192)])
def test_rows_in_three_parts_have_the_same_bits(
    device, run_both, assert_same, make, monkeypatch, rows, columns, dtype
):
    """As on Hopper, which is the only GPU that takes such tiles."""
    from sixbit_diffusion.kernels import row_tiles, rows_triton

    monkeypatch.setattr(rows_triton, "capability_of", lambda x: (9, 0))
    block = hadamard_block_size(columns)
    tile = row_tiles.row_tile(columns, dtype, row_tiles.PLAIN, (9, 0), block)
    assert tile.parts == (3 if columns >= 384 else 1)  # too narrow to be cut
    x = make(rows, columns, dtype=dtype, device=device, integers=True)
    x[1, columns // 2], x[2, 7] = torch.nan, torch.inf
    expected, got = run_both(hadamard_quantize_int8, x, block)
    assert got[1].isnan().flatten().tolist() == [False, True, True] + [False] * (rows - 3)
    assert_same(expected[1], got[1])
    finite = ~got[1].isnan().flatten()
    assert_same(expected[0][finite], got[0][finite])


@pytest.mark.parametrize(
    "rows, columns, block", [CASES[0], CASES[2], *(pytest.param(*c, marks=pytest.mark.gpu) for c in LARGE)]
)
def test_fused_quantization_of_any_numbers(device, run_both, make, rows, columns, block):
    """The order of a sum moves its last bit, and with it a value that lies on a tie: by one step, rarely."""
    x = make(rows, columns, device=device)
    (q, scale), (twin_q, twin_scale) = run_both(hadamard_quantize_int8, x, block)
    torch.testing.assert_close(twin_scale, scale, rtol=1e-5, atol=0)
    assert (twin_q.int() - q.int()).abs().max() <= 1
    assert (twin_q != q).float().mean() <= 1e-3
    expected, got = run_both(hadamard_quantize_nvfp4, x, block)
    torch.testing.assert_close(got[2], expected[2], rtol=1e-5, atol=0)
    assert (got[0] != expected[0]).float().mean() <= 2e-3


def test_an_outlier_is_spread():
    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(0))
    x[:, 5] = 300.0

    def error(q: torch.Tensor, scale: torch.Tensor, exact: torch.Tensor) -> float:
        return float((q * scale - exact).norm())

    plain = error(*quantize_int8(x), x)
    rotated = error(*hadamard_quantize_int8(x, 128), block_hadamard(x, 128))
    assert rotated < plain / 3


def test_any_rank_and_stride(device, run_both, make):
    x = make(3, 4, 32, device=device).transpose(0, 1)
    (expected,), (got,) = run_both(block_hadamard, x, 16)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    for block in (0, 1):
        (expected,), (got,) = run_both(block_hadamard, x, block)
        assert torch.equal(expected, x) and torch.equal(got, x)


def test_wrong_arguments_are_named():
    x = torch.zeros(2, 48)
    for call, message in (
        (lambda: block_hadamard(x, 32), "power of two that divides K = 48 as block, got 32"),
        (lambda: block_hadamard(x, 3), "got 3"),
        (lambda: block_hadamard(torch.zeros(2, 512), 256), "got 256; the largest is 128"),
        (lambda: hadamard_quantize_int8(x, -2), "got -2"),
        (lambda: hadamard_quantize_int8(x[0], 16), "2-D"),
        (lambda: hadamard_quantize_nvfp4(x[:, :24], 8), "multiple of 16, got K = 24"),
        (lambda: hadamard_block_size(0), "positive K, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
