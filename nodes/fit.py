"""Sampling starts only from a latent that the model can take; 1.5's latent frames go in pairs.

CogVideoX1.5 reads latent frames two by two, and its 16N+1 frames are an odd number of latent ones. As in
diffusers one more is sampled in front of them, noise like the others, and leaves when sampling is done: a
clip of 81 frames is 21 latent frames before and after the sampler and 22 within. An even number is a clip
that already has its extra frame, as between two samplers that share the steps. Noise that the host drew for
21 frames is drawn again for 22, so that one seed starts the clip that diffusers' 22 do.
"""

from collections.abc import Callable
from typing import Any

import comfy.sample
import torch

KEY = "sixbit_fit"


def fit_clip(
    executor: Any,
    noise: torch.Tensor,
    latent_image: torch.Tensor,
    sampler: Any,
    sigmas: torch.Tensor,
    denoise_mask: torch.Tensor | None = None,
    callback: Callable | None = None,
    disable_pbar: bool = False,
    seed: int | None = None,
    **rest: Any,
) -> torch.Tensor:
    """OUTER_SAMPLE wrapper of every MODEL of this pack. Raises ValueError for a latent that does not fit."""
    plan = executor.class_obj.model_patcher.model.plan
    plan.rules.check_latent(tuple(noise.shape))
    pair = plan.rules.patch_time
    if pair == 1:
        return executor(
            noise, latent_image, sampler, sigmas, denoise_mask, callback, disable_pbar, seed, **rest
        )
    missing = -noise.shape[2] % pair
    if missing:
        noise = _longer_noise(noise, latent_image, missing, seed)
        latent_image = _led_by(latent_image, missing)
        denoise_mask = None if denoise_mask is None else _led_by(denoise_mask, missing)
        rest["latent_shapes"] = [latent_image.shape]
    shown = None if callback is None else _without_lead(callback, pair - 1)
    out = executor(noise, latent_image, sampler, sigmas, denoise_mask, shown, disable_pbar, seed, **rest)
    return out[:, :, pair - 1 :] if float(sigmas[-1]) == 0 else out  # an unfinished one goes on in pairs


def _led_by(latent: torch.Tensor, count: int) -> torch.Tensor:
    return torch.cat([latent[:, :, :1].expand(-1, -1, count, -1, -1), latent], dim=2)


def _longer_noise(noise: torch.Tensor, latent: torch.Tensor, count: int, seed: int | None) -> torch.Tensor:
    """Noise of `count` frames more in front: all of it the host's own of the seed, where `noise` is that."""
    if not noise.any():  # a sampler that adds none
        return _led_by(noise, count)
    seed = seed or 0
    if torch.equal(noise, comfy.sample.prepare_noise(latent, seed).to(noise)):
        return comfy.sample.prepare_noise(_led_by(latent, count), seed).to(noise)
    lead = comfy.sample.prepare_noise(latent[:, :, :1].expand(-1, -1, count, -1, -1), seed)
    return torch.cat([lead.to(noise), noise], dim=2)


def _without_lead(callback: Callable, lead: int) -> Callable:
    """Previews and the denoised output show the clip only."""

    def shown(step: int, denoised: torch.Tensor, x: torch.Tensor, total: int) -> Any:
        return callback(step, denoised[:, :, lead:], x[:, :, lead:], total)

    return shown
