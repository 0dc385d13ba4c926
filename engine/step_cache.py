"""A cache of whole steps, on a full-precision diffusers transformer: what skipping blocks is held against.

EasyCache (Zhou et al. 2025, arXiv 2507.02860): x the latents, v the prediction, i the last step that was
computed, |.| the mean magnitude. A step is answered by v = x + (v_i − x_i) while

    E = Σ since i of k · |x_t − x_{t−1}| / |v_i| < τ,    k = |v_i − v_j| / |x_i − x_j|, j computed before i

and computed in the first tenth of the steps (5 of 50 in its code), in the last, and while there is no k.

Decisions are for all streams of a batch together.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from .attach import swapped

RETAINED = 0.1  # of the steps, computed at the start


class EasyCache:
    """See the module. `asked` and `answered` count evaluations.

    Args:
        threshold: τ.
    """

    def __init__(self, threshold: float) -> None:
        self.threshold, self.asked, self.answered = threshold, 0, 0
        self._rate: float | None = None  # k
        self._error = 0.0
        self._before: torch.Tensor | None = None  # x of the step before
        self._computed: tuple[torch.Tensor, torch.Tensor] | None = None  # x and v of the last computed step

    @contextmanager
    def on(self, transformer: torch.nn.Module, steps: int) -> Iterator[None]:
        """Inside, the transformer is called for `steps` steps under the cache."""

        def forward(hidden_states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor]:
            compute = partial(type(transformer).forward, transformer, **{**kwargs, "return_dict": False})
            return (self.step(hidden_states, lambda x: compute(hidden_states=x)[0], steps),)

        with swapped([(transformer, forward)]):
            yield

    def step(
        self, x: torch.Tensor, compute: Callable[[torch.Tensor], torch.Tensor], steps: int
    ) -> torch.Tensor:
        """The prediction for `x`, computed or not."""
        now, self.asked = self.asked, self.asked + 1
        if self._rate is not None and RETAINED * steps <= now < steps - 1:
            self._error += self._rate * mean_magnitude(x - self._before) / mean_magnitude(self._computed[1])
            if self._error < self.threshold:
                self.answered, self._before = self.answered + 1, x
                return x + (self._computed[1] - self._computed[0])
        v = compute(x)
        if self._computed is not None:
            moved = mean_magnitude(x - self._computed[0])
            self._rate = mean_magnitude(v - self._computed[1]) / max(moved, 1e-12)
        self._error, self._before, self._computed = 0.0, x, (x, v)
        return v


def mean_magnitude(x: torch.Tensor) -> float:
    """Mean of |x|, in float32."""
    return x.float().abs().mean().item()
