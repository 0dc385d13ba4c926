"""Moving averages of weights, the clock of a training stage, and its learning rate.

Schedules follow elapsed time instead of steps, so that a stage fits its budget at any speed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

import torch
from torch import nn


class EMA:
    """average <- decay * average + (1 - decay) * weight.

    Args:
        module: whose parameters to follow, from their present values on.
        decay: its final value.
        rising: let it rise to that over the first steps, so that fresh weights are soon forgotten.
    """

    def __init__(self, module: nn.Module, decay: float, rising: bool = True):
        self.decay = decay
        self.rising = rising
        self.names = [name for name, _ in module.named_parameters()]
        self.weights = [p.data for p in module.parameters()]
        self.averages = [p.detach().clone() for p in module.parameters()]

    def update(self, step: int) -> None:
        """Take in the weights after step number `step`."""
        decay = min(self.decay, (1 + step) / (10 + step)) if self.rising else self.decay
        torch._foreach_lerp_(self.averages, self.weights, 1 - decay)

    @torch.no_grad()
    def copy_to(self, module: nn.Module) -> None:
        """Write the averages into the parameters of `module`, which has the same names."""
        targets = dict(module.named_parameters())
        for name, average in zip(self.names, self.averages, strict=True):
            targets[name].copy_(average)


class Clock:
    """Seconds of training so far, counted over all commands of a stage."""

    def __init__(self, total: float, elapsed: float = 0.0):
        self.total = total
        self._before = elapsed
        self._start = time.monotonic()

    def restart(self) -> None:
        """Forget the time since construction (compilation, first allocations)."""
        self._start = time.monotonic()

    @property
    def elapsed(self) -> float:
        return self._before + time.monotonic() - self._start

    @property
    def progress(self) -> float:
        """Share of the budget used, in [0, 1]."""
        return min(1.0, self.elapsed / self.total)


def rate_at(peak: float, progress: float, step: int, warmup: int) -> float:
    """The learning rate: a linear rise over `warmup` steps times a cosine over the budget."""
    return peak * min(1.0, (step + 1) / warmup) * 0.5 * (1 + math.cos(math.pi * progress))


def decay_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict]:
    """Optimizer groups: matrices decay, vectors do not."""
    parameters = list(parameters)
    matrices = [p for p in parameters if p.ndim >= 2]
    vectors = [p for p in parameters if p.ndim < 2]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
