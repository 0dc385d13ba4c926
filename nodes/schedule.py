"""CogVideoX's noise levels, for a host that counts in sigma.

    a[t]  = prod (1 - beta), sqrt(beta) evenly spaced from sqrt(0.00085) to sqrt(0.012)
    a[t] <- a / (s + (1 - s) a)                       s = snr_shift_scale (3.0 for the 2B)
    sqrt(a) <- (sqrt(a) - last) * first / (first - last)          zero terminal SNR
    sigma = sqrt((1 - a) / a)

Source: diffusers' `CogVideoXDDIMScheduler`; zero terminal SNR from Lin et al. (arXiv 2305.08891). The last a
would be 0, which has no sigma: it is `ALPHA_FLOOR`, where the host's samplers stop too.
"""

import torch

TIMESTEPS = 1000
ALPHA_FLOOR = 4.9e-8
_BETA_START, _BETA_END = 0.00085, 0.012


def sigmas(snr_shift_scale: float) -> torch.Tensor:
    """Noise level of every training timestep: (1000,) float32, rising."""
    betas = torch.linspace(_BETA_START**0.5, _BETA_END**0.5, TIMESTEPS, dtype=torch.float64) ** 2
    alphas = torch.cumprod(1.0 - betas, dim=0)
    alphas = alphas / (snr_shift_scale + (1.0 - snr_shift_scale) * alphas)
    roots = alphas.sqrt()
    roots = (roots - roots[-1]) * (roots[0] / (roots[0] - roots[-1]))
    alphas = (roots**2).clamp_min(ALPHA_FLOOR)
    return ((1.0 - alphas) / alphas).sqrt().float()


def at_terminal(
    denoised: torch.Tensor, x: torch.Tensor, sigma: torch.Tensor, following: torch.Tensor
) -> torch.Tensor:
    """What to call denoised at the terminal noise level, so that a step from it is the step from alpha = 0.

    There the prediction is -v alone, and a step to the next level s' ends at -v + s' * noise. A sampler that
    counts in sigma ends at D (1 - s'/s) + x s'/s instead, with s finite.

    Args:
        denoised, x: (B, ...) what the host makes of v and x.
        sigma: (B,) the terminal level; `following`: scalar, the level after it.
    """
    sigma = sigma.view(-1, *[1] * (x.ndim - 1))
    return (denoised - x / (sigma**2 + 1)) / (1 - following / sigma)


def progress(timestep: float) -> float:
    """Share of the noise schedule that lies behind, in [0, 1), of a training timestep in [0, 999]."""
    return max(0.0, (TIMESTEPS - 1 - timestep) / TIMESTEPS)
