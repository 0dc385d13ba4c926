"""A cache of whole steps from another paper, on a full-precision diffusers transformer.

TeaCache (Liu et al. 2024, arXiv 2411.19108), as its code runs CogVideoX: e the time embedding. A step is
answered by the residual over all blocks, kept from the last computed one, while

    Σ since then of f(|e_t − e_{t−1}| / |e_{t−1}|) < τ

with f a polynomial of degree 4 that is fitted to |v_t − v_{t−1}| / |v_{t−1}| on a calibration run; it is
computed in the first step and the last. Its published coefficients are of other models, so `fit_teacache`
makes this model's. Decisions are for all streams of a batch together. EasyCache is in `engine/step_cache.py`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from sixbit_diffusion.engine.attach import swapped
from sixbit_diffusion.engine.step_cache import mean_magnitude
from sixbit_diffusion.engine.trajectory import Recording

DEGREE = 4


class TeaCache:
    """See the module. `asked` and `answered` count evaluations.

    Args:
        threshold: τ.
        coefficients: of f, highest power first.
    """

    def __init__(self, threshold: float, coefficients: Sequence[float]) -> None:
        self.threshold, self.asked, self.answered = threshold, 0, 0
        self._rescale = np.poly1d(coefficients)
        self._distance = 0.0
        self._embedded: torch.Tensor | None = None
        self._answers = False
        self._entered: tuple[torch.Tensor, torch.Tensor] | None = None
        self._residual: tuple[torch.Tensor, torch.Tensor] | None = None

    @contextmanager
    def on(self, transformer: torch.nn.Module, steps: int) -> Iterator[None]:
        """Inside, the transformer is called for `steps` steps under the cache."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            self.decide(time_embedding(transformer, kwargs["timestep"]), steps)
            return type(transformer).forward(transformer, *args, **kwargs)

        blocks = list(transformer.transformer_blocks)
        swaps = [(transformer, forward)]
        swaps += [
            (block, partial(self._block, block, n, n == len(blocks) - 1)) for n, block in enumerate(blocks)
        ]
        with swapped(swaps):
            yield

    def decide(self, embedded: torch.Tensor, steps: int) -> bool:
        """Whether the coming step is answered, from its time embedding."""
        now, self.asked = self.asked, self.asked + 1
        self._answers = False
        if 0 < now < steps - 1:
            self._distance += float(self._rescale(relative_change(embedded, self._embedded)))
            self._answers = self._distance < self.threshold
        if not self._answers:
            self._distance = 0.0
        self.answered += self._answers
        self._embedded = embedded
        return self._answers

    def _block(
        self,
        block: torch.nn.Module,
        index: int,
        last: bool,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        given = (hidden_states, encoder_hidden_states)
        if self._answers:
            return given if index else (given[0] + self._residual[0], given[1] + self._residual[1])
        if index == 0:
            self._entered = given
        out = type(block).forward(block, *given, *args, **kwargs)
        if last:
            self._residual = (out[0] - self._entered[0], out[1] - self._entered[1])
        return out


def fit_teacache(transformer: torch.nn.Module, recordings: Sequence[Recording]) -> list[float]:
    """TeaCache's coefficients of a model, from full-precision runs."""
    x, y = [], []
    for recording in recordings:
        embedded = [time_embedding(transformer, kwargs["timestep"]) for kwargs in recording.inputs]
        for now in range(1, len(embedded)):
            x.append(relative_change(embedded[now], embedded[now - 1]))
            y.append(relative_change(recording.outputs[now], recording.outputs[now - 1]))
    return [float(c) for c in np.polyfit(x, y, min(DEGREE, len(x) - 1))]


@torch.no_grad()
def time_embedding(transformer: torch.nn.Module, timestep: torch.Tensor) -> torch.Tensor:
    """(B, E): what the adaLN linears read."""
    weight = next(transformer.time_embedding.parameters())
    return transformer.time_embedding(transformer.time_proj(timestep).to(weight.dtype))


def relative_change(new: torch.Tensor, old: torch.Tensor) -> float:
    """|new − old| / |old|, mean magnitudes."""
    return mean_magnitude(new - old) / mean_magnitude(old)
