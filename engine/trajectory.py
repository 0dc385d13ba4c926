"""Trajectory error: how far a run's predictions lie from full precision, step by step, without drifting.

    e = mean over steps t and streams s of ||v[t, s] - v_full[t, s]||_2 / ||v_full[t, s]||_2

At every step the model is fed the inputs of the full-precision run; caches are fed with the deltas of their
own earlier evaluations. Unlike PSNR it does not diverge, so a few prompts tell methods apart.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..sixbit_core.report import RunReport
from ..sixbit_core.run import RunState
from .attach import CONDITIONINGS, attached, swapped
from .pipeline import LoadedModel, TextEmbeds
from .sample import ClipSpec, sample
from .schedule import plan
from .settings import RunSettings


@dataclass(frozen=True)
class Recording:
    """A full-precision run.

    Attributes:
        clip: what was sampled.
        inputs: keyword arguments of the transformer at each step.
        outputs: its prediction at each step, (streams, frames, channels, h, w).
        latents: what the run ended in.
    """

    clip: ClipSpec
    inputs: tuple[dict[str, Any], ...]
    outputs: tuple[torch.Tensor, ...]
    latents: torch.Tensor


def record(model: LoadedModel, clip: ClipSpec, embeds: TextEmbeds | None = None) -> Recording:
    """Sample `clip` in full precision and keep what went in and came out at every step."""
    transformer = model.use("full")
    inputs: list[dict[str, Any]] = []
    outputs: list[torch.Tensor] = []

    def forward(**kwargs: Any) -> Any:
        result = type(transformer).forward(transformer, **kwargs)
        inputs.append(kwargs)
        outputs.append(result[0])
        return result

    with swapped([(transformer, forward)]):
        sampled = sample(model, None, clip, embeds)
    return Recording(clip, tuple(inputs), tuple(outputs), sampled.latents)


def trajectory_error(
    model: LoadedModel, settings: RunSettings, recording: Recording
) -> tuple[float, RunReport]:
    """The trajectory error of `settings` on a recorded run, and what the run decided."""
    run = RunState(model.layout, settings.dmpq, settings.cache, settings.predictor)
    return trajectory_error_under(model, run, settings.weights, recording)


def trajectory_error_under(
    model: LoadedModel, run: RunState, weights: str, recording: Recording
) -> tuple[float, RunReport]:
    """The same under a run of one's own, which is closed at the end, whatever happens."""
    transformer = model.use(weights)
    evaluations = plan(model.pipeline.scheduler, recording.clip.steps)
    conditionings = CONDITIONINGS[2 if recording.clip.guided else 1]
    try:
        with attached(transformer, run, evaluations, model.facts.family, conditionings):
            error = replay(transformer, recording)
            run.finish()
        return error, run.report()
    finally:
        run.close()


@torch.no_grad()
def replay(transformer: nn.Module, recording: Recording) -> float:
    """The trajectory error of a transformer as it stands."""
    errors = [
        relative_errors(transformer(**kwargs)[0], full)
        for kwargs, full in zip(recording.inputs, recording.outputs, strict=True)
    ]
    return torch.cat(errors).mean().item()


def relative_errors(prediction: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    """||v - v_full|| / ||v_full|| of each stream, (B,) float32."""
    difference = (prediction.float() - full.float()).flatten(1).norm(dim=1)
    return difference / full.float().flatten(1).norm(dim=1)
