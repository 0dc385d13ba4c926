"""The sampling schedule as the core wants it: per evaluation sigma, progress, and whether it is the last.

    sigma = sqrt((1 - alpha_cumprod) / alpha_cumprod), alpha clamped from below: zero terminal SNR makes it 0
    progress = step / steps

The sampler is always DDIM with trailing spacing, the set-up of the paper: deterministic, so that one seed is
one clip, and equal to a stock ddim sampler on "simple" spacing.
"""

from dataclasses import dataclass

from diffusers import CogVideoXDDIMScheduler

ALPHA_FLOOR = 4.9e-8  # sigma 4518: where samplers that count in sigma stop too


@dataclass(frozen=True)
class Evaluation:
    """One call of the transformer for all its streams; `timestep` is how the pipeline names it."""

    timestep: int
    sigma: float
    progress: float
    last: bool


def ddim_trailing(config: dict) -> CogVideoXDDIMScheduler:
    """A DDIM scheduler with a pipeline's own noise schedule and trailing spacing."""
    kept = {key: value for key, value in dict(config).items() if not key.startswith("_")}
    kept.pop("timestep_spacing", None)
    return CogVideoXDDIMScheduler.from_config(kept, timestep_spacing="trailing")


def plan(scheduler: CogVideoXDDIMScheduler, steps: int) -> tuple[Evaluation, ...]:
    """The evaluations that sampling in `steps` steps will make."""
    scheduler.set_timesteps(steps)
    timesteps = scheduler.timesteps.tolist()
    alphas = [max(ALPHA_FLOOR, scheduler.alphas_cumprod[t].item()) for t in timesteps]
    return tuple(
        Evaluation(timestep, ((1 - alpha) / alpha) ** 0.5, index / len(alphas), index == len(alphas) - 1)
        for index, (timestep, alpha) in enumerate(zip(timesteps, alphas, strict=True))
    )
