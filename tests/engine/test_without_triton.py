"""A whole run by the products of a GPU without Triton: the reference's latents, bit for bit."""

import importlib.util

import pytest
import torch
from sixbit_diffusion.engine.sample import ClipSpec, sample
from sixbit_diffusion.engine.settings import Choice, RunSettings, resolve
from sixbit_diffusion.kernels import int8_linear, linear_torch

CLIP = ClipSpec("a red star is moving right", (32, 32), 9, steps=2, seed=3)


@pytest.mark.parametrize("product", ["int_mm", "kitchen"])
def test_a_run_is_the_references(tiny, monkeypatch, product):
    if product == "kitchen" and importlib.util.find_spec("comfy_kitchen") is None:
        pytest.skip("comfy-kitchen is not installed")
    chosen = resolve(Choice(precision="w4a8", cache="off"), lambda: "")
    settings = RunSettings(chosen.precision, chosen.dmpq, None, chosen.predictor, chosen.weights)
    expected = sample(tiny, settings, CLIP).latents

    twin, when = int8_linear.implementations[product]
    calls = []
    counted = (lambda *args: calls.append(args[0].shape[0]) or twin(*args), when)
    monkeypatch.setitem(int8_linear.implementations, product, counted)
    monkeypatch.setattr(linear_torch, "int8_product", lambda x: product)
    assert torch.equal(sample(tiny, settings, CLIP).latents, expected)
    assert len(calls) == 2 * 2 * 4  # steps, blocks, linears of a block with q, k and v as one
