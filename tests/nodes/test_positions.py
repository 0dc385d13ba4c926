"""Positions and noise levels are those of diffusers."""

import pytest
import torch
from sixbit_diffusion.nodes.positions import crop_region, rotary_table, sincos_table
from sixbit_diffusion.nodes.schedule import progress, sigmas

CPU = torch.device("cpu")
GRIDS = [(13, 30, 45), (3, 30, 45), (2, 24, 45), (2, 40, 30), (1, 16, 16), (3, 17, 31)]


@pytest.mark.parametrize("grid", GRIDS)
def test_rotary_equals_diffusers(grid: tuple[int, int, int]) -> None:
    embeddings = pytest.importorskip("diffusers.models.embeddings")
    pipeline = pytest.importorskip("diffusers.pipelines.cogvideo.pipeline_cogvideox")
    crop = pipeline.get_resize_crop_region_for_grid(grid[1:], 45, 30)
    assert crop_region(grid[1:], (30, 45)) == tuple(zip(*crop, strict=True))
    expected = embeddings.get_3d_rotary_pos_embed(64, crop, grid[1:], grid[0])
    for found, table in zip(rotary_table(grid, 64, (30, 45), CPU), expected, strict=True):
        torch.testing.assert_close(found, table, rtol=0, atol=2e-6)


def test_rotary_of_later_models_counts_patches() -> None:
    embeddings = pytest.importorskip("diffusers.models.embeddings")
    expected = embeddings.get_3d_rotary_pos_embed(
        64, None, (24, 42), 5, grid_type="slice", max_size=(150, 150)
    )
    for found, table in zip(rotary_table((5, 24, 42), 64, None, CPU), expected, strict=True):
        torch.testing.assert_close(found, table, rtol=0, atol=2e-6)


@pytest.mark.parametrize("grid", GRIDS[:3])
def test_sincos_equals_diffusers(grid: tuple[int, int, int]) -> None:
    embeddings = pytest.importorskip("diffusers.models.embeddings")
    expected = embeddings.get_3d_sincos_pos_embed(
        128, (grid[2], grid[1]), grid[0], 1.875, 1.0, output_type="pt"
    )
    found = sincos_table(grid, 128, 1.875, 1.0, CPU)
    torch.testing.assert_close(found, expected.flatten(0, 1).float(), rtol=0, atol=2e-6)


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_sigmas_equal_diffusers(shift: float) -> None:
    diffusers = pytest.importorskip("diffusers")
    scheduler = diffusers.CogVideoXDDIMScheduler(rescale_betas_zero_snr=True, snr_shift_scale=shift)
    alphas = scheduler.alphas_cumprod.double()[:-1]
    expected = ((1 - alphas) / alphas).sqrt().float()
    found = sigmas(shift)
    torch.testing.assert_close(found[:-1], expected, rtol=1e-4, atol=1e-6)
    assert found[-1] > found[-2] and torch.isfinite(found).all()


def test_progress_of_even_steps_is_their_share() -> None:
    assert [progress(999 - 20 * step) for step in range(50)] == [step / 50 for step in range(50)]
    assert progress(1000) == 0
