"""The sampling schedule as the core wants it: per evaluation sigma, progress, and whether it is the last.

    sigma = sqrt((1 - alpha_cumprod) / alpha_cumprod), alpha clamped from below: zero terminal SNR makes it 0
    progress = step / steps

The sampler is always DDIM with trailing spacing, the set-up of the paper: deterministic, so that one seed is
one clip, and equal to a stock ddim sampler on "simple" spacing. A pipeline names a step by a tensor on the
device that is a view of the list of all steps; `TimestepReader` brings that list to the host once a run.
"""

from dataclasses import dataclass
from typing import Any

import torch
from diffusers import CogVideoXDDIMScheduler

ALPHA_FLOOR = 4.9e-8  # sigma 4518: where samplers that count in sigma stop too


@dataclass(frozen=True)
class Evaluation:
    """One call of the transformer for all its streams; `timestep` is how the pipeline names it."""

    timestep: int
    sigma: float
    progress: float
    last: bool


class TimestepReader:
    """Timesteps as numbers, waiting for the device once for all views of one tensor."""

    def __init__(self) -> None:
        self._kept: torch.Tensor | None = None  # the last tensor read; keeps its storage from being reused
        self._version = -1
        self._values: list[int] = []

    def read(self, timestep: torch.Tensor | int) -> int:
        """The number of a timestep: an int, or a tensor whose first value is meant."""
        if not isinstance(timestep, torch.Tensor):
            return int(timestep)
        if timestep.is_inference():  # has no version
            return int(timestep.reshape(-1)[0])
        if not self._knows(timestep):
            whole = torch.empty(0, dtype=timestep.dtype, device=timestep.device)
            self._values = whole.set_(timestep.untyped_storage()).tolist()
            self._kept, self._version = timestep, timestep._version
        return int(self._values[timestep.storage_offset()])

    def _knows(self, timestep: torch.Tensor) -> bool:
        """Whether it is a view of what was read, unchanged since; the version counts changes in place."""
        kept = self._kept
        return (
            kept is not None
            and timestep.dtype == kept.dtype
            and timestep.untyped_storage().data_ptr() == kept.untyped_storage().data_ptr()
            and timestep._version == self._version
        )


class DDIMTrailing(CogVideoXDDIMScheduler):
    """diffusers' DDIM scheduler, whose steps do not wait for the device."""

    def set_timesteps(self, *args: Any, **kwargs: Any) -> None:
        """See `CogVideoXDDIMScheduler.set_timesteps`."""
        super().set_timesteps(*args, **kwargs)
        self._reader = TimestepReader()

    def step(
        self, model_output: torch.Tensor, timestep: torch.Tensor | int, *args: Any, **kwargs: Any
    ) -> Any:
        """See `CogVideoXDDIMScheduler.step`."""
        return super().step(model_output, self._reader.read(timestep), *args, **kwargs)


def ddim_trailing(config: dict) -> DDIMTrailing:
    """A DDIM scheduler with a pipeline's own noise schedule and trailing spacing."""
    kept = {key: value for key, value in dict(config).items() if not key.startswith("_")}
    kept.pop("timestep_spacing", None)
    return DDIMTrailing.from_config(kept, timestep_spacing="trailing")


def plan(scheduler: CogVideoXDDIMScheduler, steps: int) -> tuple[Evaluation, ...]:
    """The evaluations that sampling in `steps` steps will make."""
    scheduler.set_timesteps(steps)
    timesteps = scheduler.timesteps.tolist()
    alphas = [max(ALPHA_FLOOR, scheduler.alphas_cumprod[t].item()) for t in timesteps]
    return tuple(
        Evaluation(timestep, ((1 - alpha) / alpha) ** 0.5, index / len(alphas), index == len(alphas) - 1)
        for index, (timestep, alpha) in enumerate(zip(timesteps, alphas, strict=True))
    )
