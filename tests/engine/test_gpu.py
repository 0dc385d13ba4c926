"""The tiny pipeline on a GPU: routes, skips and PDR through the real kernels, in bf16."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sixbit_diffusion.engine.machine import find_machine
from sixbit_diffusion.engine.pipeline import LoadedModel, load_model
from sixbit_diffusion.engine.sample import ClipSpec, sample
from sixbit_diffusion.engine.settings import Choice, resolve
from sixbit_diffusion.sixbit_core.config import DeltaCacheConfig

pytestmark = pytest.mark.gpu

CLIP = ClipSpec("a red star is moving right", (32, 32), 9, steps=6, seed=3)
EAGER = DeltaCacheConfig(threshold=10.0, max_skips=2, start=0.0)


@pytest.fixture(scope="module")
def gpu(tiny_folder: Path) -> LoadedModel:
    return load_model(str(tiny_folder), None, "search", find_machine("cuda"))


def test_it_computes_in_bf16_on_the_gpu(gpu):
    assert (gpu.device.type, gpu.dtype) == ("cuda", torch.bfloat16)
    linear = gpu.transformers["search"].transformer_blocks[0].ff.net[2]
    assert linear.data.is_cuda and linear.data.dtype == torch.uint8


@pytest.mark.parametrize("location", ["gpu", "gpu-int8", "gpu-nvfp4", "host"])
def test_w4a8_with_skips_and_purified_refresh(gpu, location):
    chosen = resolve(Choice(precision="w4a8"), lambda: "")
    # every ratio is above 1, so each linear of a refresh runs in 16 bits
    dmpq = replace(chosen.dmpq, outlier_limit=1.0)
    chosen = replace(chosen, dmpq=dmpq, cache=replace(EAGER, location=location))
    first, second = sample(gpu, chosen, CLIP), sample(gpu, chosen, CLIP)
    assert first.report.choices["q"] == ("88--b8", "88--b8")
    assert first.report.skipped_fraction == 2 / 6
    assert torch.isfinite(first.latents).all() and first.latents.dtype == torch.bfloat16
    assert torch.equal(first.latents, second.latents) and first.report == second.report


def test_random_routing_runs_both_formats(gpu):
    chosen = resolve(Choice(precision="dmpq", router="random", bits=6.0, cache="off"), lambda: "")
    run = sample(gpu, chosen, CLIP)
    letters = set("".join(row for rows in run.report.choices.values() for row in rows))
    assert letters == {"4", "8"} and 5 < run.report.average_activation_bits < 7
    assert torch.isfinite(run.latents).all()
    assert torch.equal(run.latents, sample(gpu, chosen, CLIP).latents)


@pytest.mark.parametrize(("precision", "most"), [("w4a16", 0.02), ("w4a8", 0.03), ("w4a4", 0.06)])
def test_a_step_is_that_of_the_cpu(gpu, tiny, precision, most):
    """One step from the same noise: bf16 through the kernels beside float32 through the references."""
    clip = ClipSpec(
        CLIP.prompt, (32, 32), 9, steps=1, cfg=1.0, seed=3
    )  # guidance would multiply the rounding
    chosen = resolve(Choice(precision=precision, cache="off"), lambda: "")
    found, expected = sample(gpu, chosen, clip).latents.float().cpu(), sample(tiny, chosen, clip).latents
    assert (found - expected).norm() / expected.norm() < most
