"""The methods that `sixbit verify` holds against full precision, and how each samples a clip."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from ..kernels import tuning
from .cost import FULL_BITS, Macs, run_cost, step_cache_cost
from .facts import ModelFacts
from .machine import Machine
from .pipeline import LoadedModel, TextEmbeds
from .rows import Row
from .sample import ClipSpec, sample
from .settings import Choice, RunSettings, settle
from .step_cache import EasyCache
from .transformer import FULL

FULL_PRECISION, W4A8, DEFAULT, CACHED = "full", "w4a8", "default", "default-tdc"
STEP_CACHE, FEWER_STEPS = "step-cache", "fewer-steps"
THRESHOLD = 0.05  # τ of the step cache: on the reference it answers about as much as TDC skips
WEIGHT_BITS = 4

Sampler = Callable[[LoadedModel, Macs, ClipSpec, TextEmbeds], tuple[torch.Tensor, Row]]


@dataclass(frozen=True)
class Method:
    """One way to sample.

    Attributes:
        title: for the reader.
        told: what it is set to.
        weights: the transformer that it needs.
        sample: latents of a clip; its bits, skipped share, cost and seconds.
        costs_as: it samples in that share of the steps which this method's clip of the prompt cost; None
            for all steps.
    """

    name: str
    title: str
    told: str
    weights: str
    sample: Sampler
    costs_as: str | None = None


def find_methods(facts: ModelFacts, machine: Machine) -> tuple[Method, ...]:
    """The methods for a model on a machine, as the reader sees them; where the default without cache is W4A8,
    that is one method. Raises InputError."""
    w4a8 = settle(Choice(precision="w4a8", cache="off"), facts, machine)
    default = settle(Choice(cache="off"), facts, machine)
    cached = settle(Choice(), facts, machine)
    alike = _decides(default) == _decides(w4a8)
    word = default.precision.upper() if default.precision != "dmpq" else "DMPQ"
    return (
        Method(FULL_PRECISION, "full precision", "16-bit weights as stored", FULL, _plain),
        _ours(W4A8, "W4A8, the default here" if alike else "W4A8", w4a8),
        *(() if alike else (_ours(DEFAULT, f"default: {word}", default),)),
        _ours(CACHED, f"default: {word} + TDC", cached),
        Method(STEP_CACHE, "full + step cache", f"EasyCache, threshold {THRESHOLD:g}", FULL, _step_cached),
        Method(FEWER_STEPS, "fewer steps", f"full precision at the cost of {CACHED}", FULL, _plain, CACHED),
    )


def order_of_work(methods: Sequence[Method]) -> list[Method]:
    """Full precision first, what needs another's cost last; weights change twice at most."""
    stages = {FULL_PRECISION: 0, STEP_CACHE: 1, FEWER_STEPS: 3}
    return sorted(methods, key=lambda method: stages.get(method.name, 2))


def _ours(name: str, title: str, settings: RunSettings) -> Method:
    return Method(name, title, settings.label(), settings.weights, partial(_run, settings))


def _decides(settings: RunSettings) -> RunSettings:
    """Settings without what only names them."""
    return replace(settings, precision="", note=None)


def _plain(model: LoadedModel, macs: Macs, clip: ClipSpec, embeds: TextEmbeds) -> tuple[torch.Tensor, Row]:
    made = sample(model, None, clip, embeds)
    return made.latents, _row(made.seconds, 1.0, FULL_BITS, FULL_BITS, 0.0)


def _step_cached(
    model: LoadedModel, macs: Macs, clip: ClipSpec, embeds: TextEmbeds
) -> tuple[torch.Tensor, Row]:
    cache = EasyCache(THRESHOLD)
    with cache.on(model.use(FULL), clip.steps):
        made = sample(model, None, clip, embeds)
    skipped = cache.answered / cache.asked
    bits = (FULL_BITS, FULL_BITS * (1 - skipped))
    return made.latents, _row(made.seconds, step_cache_cost(macs, skipped), *bits, skipped)


def _run(
    settings: RunSettings, model: LoadedModel, macs: Macs, clip: ClipSpec, embeds: TextEmbeds
) -> tuple[torch.Tensor, Row]:
    with tuning(settings.tunes, lambda *_: None):
        made = sample(model, settings, clip, embeds)
    report = made.report
    cost = run_cost(macs, report, WEIGHT_BITS, clip.steps)
    bits = (report.average_activation_bits, report.effective_activation_bits)
    return made.latents, _row(made.seconds, cost, *bits, report.skipped_fraction or 0.0)


def _row(seconds: float, cost: float, average: float | None, effective: float | None, skipped: float) -> Row:
    return {
        "seconds": round(seconds, 3),
        "average_activation_bits": average,
        "effective_activation_bits": effective,
        "skipped_fraction": skipped,
        "cost": cost,
    }
