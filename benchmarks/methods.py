"""Ways to sample that `quality.py` holds against each other: the pack's own runs, and what takes their place.

A method samples a clip, follows a recorded run (trajectory error), and says what it cost. Its `identity` is
equal only where it does the same under the same name, its `key` wherever it does the same to a prompt.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from parts import Bench
from sixbit_diffusion.engine.cost import model_macs, run_cost, step_cache_cost
from sixbit_diffusion.engine.pipeline import TextEmbeds
from sixbit_diffusion.engine.rows import Row
from sixbit_diffusion.engine.sample import ClipSpec, sample, sample_under
from sixbit_diffusion.engine.settings import Choice, RunSettings
from sixbit_diffusion.engine.trajectory import Recording, replay, trajectory_error_under
from sixbit_diffusion.engine.transformer import FULL
from sixbit_diffusion.sixbit_core.predictor import load_predictor
from sixbit_diffusion.sixbit_core.report import RunReport
from sixbit_diffusion.sixbit_core.run import RunState

REPORTED = ("average_activation_bits", "effective_activation_bits", "skipped_fraction")


class Method(Protocol):
    """One way to sample."""

    name: str
    baseline: (
        str | None
    )  # the method whose own error is not counted against this one; None for full precision

    @property
    def identity(self) -> str: ...

    def key(self, bench: Bench, number: int) -> str:
        """What it does to the prompt `number`, whatever it is called."""

    def sample(self, bench: Bench, clip: ClipSpec, embeds: TextEmbeds) -> tuple[torch.Tensor, Row]:
        """Latents of a clip; bits, skips, cost and seconds."""

    def follow(self, bench: Bench, recording: Recording) -> float | None:
        """Trajectory error on a recorded run, None where there is none."""


MakeRun = Callable[[Bench, RunSettings], RunState]


def own_run(bench: Bench, settings: RunSettings) -> RunState:
    """The pack's own run."""
    return RunState(bench.model.layout, settings.dmpq, settings.cache, settings.predictor)


@dataclass(frozen=True)
class Ours:
    """A run of the pack, or one that takes its place.

    Attributes:
        choice: as the command line takes it.
        dmpq, cache: fields of its settings in place of the choice's.
        weights: the transformer that runs, in place of the choice's.
        make_run: the run.
    """

    name: str
    choice: Choice
    baseline: str | None = None
    dmpq: dict[str, object] = field(default_factory=dict)
    cache: dict[str, object] = field(default_factory=dict)
    weights: str | None = None
    make_run: MakeRun = own_run

    @property
    def identity(self) -> str:
        told = (self.name, self.choice, self.baseline, self.dmpq, self.cache, self.weights, self._run_name)
        return repr(told)

    @property
    def _run_name(self) -> str:
        return getattr(self.make_run, "__qualname__", None) or repr(self.make_run)

    def key(self, bench: Bench, number: int) -> str:
        found = self.settings(bench, number)
        predicted = found.predictor is not None
        return repr((found.dmpq, found.cache, found.weights, predicted, self._run_name))

    def settings(self, bench: Bench, number: int) -> RunSettings:
        """What runs, with everything random drawn anew for a prompt."""
        found = bench.settings(self.choice, number)
        dmpq = found.dmpq and replace(found.dmpq, **self.dmpq)
        cache = found.cache and replace(found.cache, **self.cache)
        predictor = found.predictor
        if predictor is None and cache is not None and bench.given.predictor is not None:
            predictor = load_predictor(bench.given.predictor)  # skipping may ask it, full precision has none
        weights = self.weights or found.weights
        return replace(found, dmpq=dmpq, cache=cache, predictor=predictor, weights=weights)

    def sample(self, bench: Bench, clip: ClipSpec, embeds: TextEmbeds) -> tuple[torch.Tensor, Row]:
        settings = self.settings(bench, clip.seed)
        made = sample_under(bench.model, self.make_run(bench, settings), settings.weights, clip, embeds)
        return made.latents, self._told(bench, settings, made.report, clip.steps) | {"seconds": made.seconds}

    def follow(self, bench: Bench, recording: Recording) -> float | None:
        settings = self.settings(bench, recording.clip.seed)
        run = self.make_run(bench, settings)
        return trajectory_error_under(bench.model, run, settings.weights, recording)[0]

    def _told(self, bench: Bench, settings: RunSettings, report: RunReport, steps: int) -> Row:
        bits = 16 if settings.weights == FULL else 4
        cost = run_cost(model_macs(bench.facts), report, bits, steps)
        return {name: getattr(report, name) for name in REPORTED} | {"cost": cost}


@dataclass(frozen=True)
class FewerSteps:
    """Full precision in a share `kept` of the steps."""

    name: str
    kept: float
    baseline: str | None = None

    @property
    def identity(self) -> str:
        return repr(self)

    def key(self, bench: Bench, number: int) -> str:
        return self.identity

    def sample(self, bench: Bench, clip: ClipSpec, embeds: TextEmbeds) -> tuple[torch.Tensor, Row]:
        steps = max(1, round(self.kept * clip.steps))
        made = sample(bench.model, None, replace(clip, steps=steps), embeds)
        share = steps / clip.steps
        return made.latents, {"skipped_fraction": 1 - share, "cost": share, "seconds": made.seconds}

    def follow(self, bench: Bench, recording: Recording) -> float | None:
        return None  # its steps are not those of the recording


class StepCache(Protocol):
    """Opened on a transformer it answers some evaluations without running the blocks; counts both."""

    asked: int
    answered: int

    @contextmanager
    def on(self, transformer: torch.nn.Module, steps: int) -> Iterator[None]: ...


@dataclass(frozen=True)
class Stepwise:
    """Full precision under a cache of whole steps."""

    name: str
    make: Callable[[Bench], StepCache]
    told: str  # what the cache is set to
    baseline: str | None = None

    @property
    def identity(self) -> str:
        return repr((self.name, self.told))

    def key(self, bench: Bench, number: int) -> str:
        return self.identity

    def sample(self, bench: Bench, clip: ClipSpec, embeds: TextEmbeds) -> tuple[torch.Tensor, Row]:
        cache = self.make(bench)
        with cache.on(bench.model.use(FULL), clip.steps):
            made = sample(bench.model, None, clip, embeds)
        skipped = cache.answered / cache.asked
        cost = step_cache_cost(model_macs(bench.facts), skipped)
        return made.latents, {"skipped_fraction": skipped, "cost": cost, "seconds": made.seconds}

    def follow(self, bench: Bench, recording: Recording) -> float | None:
        transformer = bench.model.use(FULL)
        with self.make(bench).on(transformer, recording.clip.steps):
            return replay(transformer, recording)
