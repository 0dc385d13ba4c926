"""The products of a GPU without Triton against the reference, on the CPU, where each of them runs too."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from sixbit_diffusion.kernels import (
    Op,
    hadamard_quantize_int8,
    int8_linear,
    int8_weight,
    linear_torch,
    linear_w4a8,
    linear_w4a16,
    quantize_nvfp4,
    use_backend,
)

kitchen = pytest.mark.skipif(
    importlib.util.find_spec("comfy_kitchen") is None, reason="comfy-kitchen is not installed"
)
EXACT = ["int_mm", pytest.param("kitchen", marks=kitchen)]


@pytest.fixture
def without_triton(monkeypatch):
    """`serve(name)`: from then on the CPU counts as a GPU that has no Triton and multiplies this way."""

    def serve(name: str) -> None:
        monkeypatch.setattr(linear_torch, "int8_product", lambda x: name)

    return serve


def operands(rows: int, inner: int, sizes: tuple[int, ...], make, block: int = 16):
    x = make(rows, inner)
    x[rows // 2 :][:1] = 0
    weights = [quantize_nvfp4(make(n, inner, seed=n)) for n in sizes]
    bias = None if len(sizes) == 2 else make(sum(sizes), dtype=torch.bfloat16)
    return (*hadamard_quantize_int8(x, block), *int8_weight(weights), bias)


def by(backend: str, op: Op, *args: object) -> torch.Tensor:
    with use_backend(backend):
        return op.implementations[backend][0](*args)


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [(24,), (24, 16), (16, 32, 8)])
def test_whole_sums_give_the_bits_of_the_reference(name, dtype, sizes, make, without_triton):
    given = (*operands(40, 128, sizes, make), dtype)
    without_triton(name)
    assert int8_linear.select(*given) == name
    got, expected = int8_linear(*given), by("reference", int8_linear, *given)
    assert got.dtype == dtype and torch.equal(got, expected)


@pytest.mark.parametrize("name", EXACT)
def test_pieces_of_many_rows_are_the_whole(name, make, without_triton, monkeypatch):
    given = (*operands(75, 64, (40,), make), torch.bfloat16)
    without_triton(name)
    expected = int8_linear(*given)
    monkeypatch.setattr(linear_torch, "VALUES", 40 * 37)  # 75 rows in 4 pieces of 18 and 19
    assert torch.equal(int8_linear(*given), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_hold_the_largest_sums(dtype, without_triton):
    K = 4096  # 127 * 127 * K is a thousand times what float16 holds
    q = torch.full((2, K), 127, dtype=torch.int8)
    weight = int8_weight([quantize_nvfp4(torch.ones(16, K))])
    without_triton("half")
    given = (q, torch.full((2, 1), 1 / 127), *weight, torch.ones(16), dtype)
    assert int8_linear.select(*given) == "half"
    torch.testing.assert_close(int8_linear(*given), torch.full((2, 16), K + 1.0, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_errs_at_most_twice_as_much_as_rounding(dtype, make, without_triton):
    given = operands(40, 256, (48,), make)
    exact = by("reference", int8_linear, *given, torch.float32)
    once = (by("reference", int8_linear, *given, dtype).float() - exact).norm()
    without_triton("half")
    got = int8_linear(*given, dtype)
    assert (got.float() - exact).norm() <= 2 * once


@pytest.mark.parametrize("name", ["int_mm", "half"])
def test_what_is_not_finite_stays_so(name, make, without_triton):
    x = make(20, 64, dtype=torch.bfloat16)
    x[3, 5] = torch.inf
    without_triton(name)
    y = linear_w4a8(x, *quantize_nvfp4(make(16, 64)))
    assert y[3].isnan().all() and y[[0, 19]].isfinite().all()


def test_what_a_product_cannot_take_is_the_references(make, without_triton):
    without_triton("int_mm")
    assert int8_linear.select(*operands(16, 64, (24,), make), torch.float32) == "reference"  # too few rows
    assert int8_linear.select(*operands(17, 64, (24, 4), make), torch.float32) == "reference"
    without_triton("half")
    assert int8_linear.select(*operands(40, 64, (24,), make), torch.float32) == "reference"
    assert int8_linear(*operands(0, 64, (24,), make), torch.bfloat16).shape == (0, 24)


@pytest.mark.parametrize("block", [1, 16])
def test_weights_alone_are_multiplied_in_sixteen_bits(block, make, without_triton):
    x, weight = make(33, 64, dtype=torch.bfloat16), quantize_nvfp4(make(24, 64))
    bias = make(24)
    expected = by("reference", linear_w4a16, x.float(), *weight, bias, block)
    once = (expected.to(x.dtype).float() - expected).norm()
    without_triton("half")
    assert linear_w4a16.select(x, *weight, bias, block) == "half"
    got = linear_w4a16(x, *weight, bias, block)
    # The weight is rounded as well as the result.
    assert got.dtype == x.dtype and (got.float() - expected).norm() <= 3 * once
    assert linear_w4a16.select(x.float(), *weight, bias, block) == "reference"


@pytest.mark.parametrize(
    "capability, has_kitchen, product",
    [
        ((8, 9), True, "kitchen"),
        ((7, 0), True, "half"),  # comfy-kitchen's needs 7.5
        ((8, 9), False, "int_mm"),
        ((12, 0), False, "int_mm"),
        ((9, 0), False, "half"),
        ((7, 5), False, "half"),
    ],
)
def test_the_product_is_chosen_by_gpu(monkeypatch, capability, has_kitchen, product):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(linear_torch, "kitchen_multiplies", lambda: has_kitchen)
    assert linear_torch._product_of.__wrapped__(0) == product  # past the cache
    assert product in linear_torch.SPOKEN


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["int_mm", "half", "kitchen"])
@pytest.mark.parametrize("inner, outer", [(3072, 3072), (12288, 3072)])
def test_on_a_gpu_at_model_sizes(name, inner, outer, make):
    if name == "kitchen" and not linear_torch.kitchen_multiplies():
        pytest.skip("comfy-kitchen has no INT8 linear for CUDA here")
    given = [t.cuda() for t in operands(4100, inner, (outer,), make, 128)]
    exact = by("reference", int8_linear, *given, torch.float32)
    once = (exact.bfloat16().float() - exact).norm()
    got = int8_linear.implementations[name][0](*given, torch.bfloat16)
    assert (got.float() - exact).norm() <= (2 if name == "half" else 1.01) * once


@kitchen
def test_kitchens_backends_are_asked():
    assert linear_torch.kitchen_multiplies("eager")
    assert not linear_torch.kitchen_multiplies("a backend that it has not")


def test_a_cpu_takes_the_references(make):
    assert linear_torch.int8_product(make(1, 16)) is None
    assert int8_linear.select(*operands(40, 64, (24,), make), torch.bfloat16) == "reference"
