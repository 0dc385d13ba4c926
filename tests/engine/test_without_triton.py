"""A whole run by the products of a GPU without Triton: the reference's latents where sums are whole."""

import importlib.util

import pytest
import torch
from sixbit_diffusion.engine.machine import find_machine
from sixbit_diffusion.engine.pipeline import load_model
from sixbit_diffusion.engine.sample import ClipSpec, sample
from sixbit_diffusion.engine.settings import Choice, RunSettings, resolve
from sixbit_diffusion.kernels import int8_backend, int8_linear, linear_torch, linear_w4a16

CLIP = ClipSpec("a red star is moving right", (32, 32), 9, steps=2, seed=3)
PRODUCTS = 2 * 2 * 4  # of INT8 in a run: steps, blocks, linears of a block with q, k and v as one


def settings_of(precision: str | None, backend: str = "reference") -> RunSettings:
    chosen = resolve(Choice(precision=precision, cache="off"), lambda: "", None, (9, 0), backend)
    return RunSettings(chosen.precision, chosen.dmpq, None, chosen.predictor, chosen.weights)


@pytest.fixture
def without_triton(monkeypatch):
    """`serve(name, op)` -> rows of the calls of the op's twin that serves where this product is chosen."""

    def serve(name, op):
        twin, when = op.implementations[name]
        calls = []
        counted = (lambda *args, **kwargs: calls.append(args[0].shape[0]) or twin(*args, **kwargs), when)
        monkeypatch.setitem(op.implementations, name, counted)
        monkeypatch.setattr(linear_torch, "int8_product", lambda x: name)
        return calls

    return serve


@pytest.mark.parametrize("product", ["int_mm", "kitchen"])
def test_a_run_is_the_references(tiny, without_triton, product):
    if product == "kitchen" and importlib.util.find_spec("comfy_kitchen") is None:
        pytest.skip("comfy-kitchen is not installed")
    settings = settings_of("w4a8")
    expected = sample(tiny, settings, CLIP).latents
    calls = without_triton(product, int8_linear)
    assert torch.equal(sample(tiny, settings, CLIP).latents, expected)
    assert len(calls) == PRODUCTS


@pytest.fixture(scope="module")
def tiny_in_16_bits(tiny_folder):
    return load_model(str(tiny_folder), None, "search", find_machine("cpu"), torch.bfloat16)


def distance(found, expected):
    return float((found.float() - expected).norm() / expected.norm())


def test_a_run_with_products_in_16_bits_is_as_right_as_the_reference(tiny, tiny_in_16_bits, without_triton):
    """Both in bfloat16, each held against the reference in float32."""
    settings = settings_of("w4a8")
    exact = sample(tiny, settings, CLIP).latents
    reference = distance(sample(tiny_in_16_bits, settings, CLIP).latents, exact)
    calls = without_triton("half", int8_linear)
    found = distance(sample(tiny_in_16_bits, settings, CLIP).latents, exact)

    assert len(calls) == PRODUCTS and found < 1.5 * reference


def test_no_precision_asked_for_leaves_activations_in_16_bits_there(tiny, tiny_in_16_bits, without_triton):
    exact = sample(tiny, settings_of("w4a16"), CLIP).latents
    reference = distance(sample(tiny_in_16_bits, settings_of("w4a16"), CLIP).latents, exact)
    int8, calls = without_triton("half", int8_linear), without_triton("half", linear_w4a16)
    settings = settings_of(None, int8_backend(torch.device("cpu")))
    found = distance(sample(tiny_in_16_bits, settings, CLIP).latents, exact)

    assert settings.precision == "w4a16" and not int8
    assert calls and found < 1.5 * reference
