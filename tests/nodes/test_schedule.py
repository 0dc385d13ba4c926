"""The first step from a finite noise level ends where the step from alpha = 0 does."""

import pytest
import torch
from sixbit_diffusion.nodes.schedule import at_terminal, sigmas


@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize("steps", [1, 2, 10, 50])
def test_first_euler_step_is_diffusers_first_ddim_step(shift: float, steps: int) -> None:
    diffusers = pytest.importorskip("diffusers")
    scheduler = diffusers.CogVideoXDDIMScheduler(
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        timestep_spacing="trailing",
        clip_sample=False,
        snr_shift_scale=shift,
    )
    scheduler.set_timesteps(steps)
    generator = torch.Generator().manual_seed(0)
    noise, v = (torch.randn((2, 4, 3, 4, 6), generator=generator) for _ in range(2))
    first = scheduler.step(v, scheduler.timesteps[0], noise, return_dict=False)[0]

    table = sigmas(shift).double()
    sigma = table[-1]
    following = table[-(1 + 1000 // steps)] if steps > 1 else torch.zeros((), dtype=torch.float64)
    x = noise.double() * (sigma**2 + 1).sqrt()
    plain = x / (sigma**2 + 1) - v.double() * sigma / (sigma**2 + 1).sqrt()
    levels = sigma.expand(2)
    denoised = at_terminal(plain, x, levels, following)
    after = x + (x - denoised) / sigma * (following - sigma)
    torch.testing.assert_close((after / (following**2 + 1).sqrt()).float(), first.float(), rtol=0, atol=2e-6)
    uncorrected = x + (x - plain) / sigma * (following - sigma)
    assert (uncorrected - after).abs().max() > 1e-4 * after.abs().max() / (following + 1)
