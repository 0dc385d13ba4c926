"""Solve the thresholds θ that give the asked-for bits, closed-loop on whole runs.

INT8 that is forced by a missing Γ is included, so the bits are those that a run has. gamma's are solved once
without and once with the delta cache. Source: 6Bit-Diffusion (arXiv 2603.18742), DMPQ.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from .calibration_run import LinearRecord
from .config import DMPQConfig
from .layout import linear_name
from .predictor import GAMMA_TIME, Predictor, theta_key

Trial = tuple[DMPQConfig, bool]  # what a threshold is solved for, and whether with the cache


@dataclass(frozen=True)
class ThetaSolution:
    """A threshold, the bits that it gave on whole runs, and how many runs were spent."""

    theta: float
    bits: float
    runs: int


def solve_theta(
    run_once: Callable[[float], float],
    target: float,
    theta_of_bits: Callable[[float], float],
    tolerance: float = 0.03,
    max_runs: int = 8,
) -> ThetaSolution:
    """Find the threshold whose whole runs average `target` bits, closed-loop.

    False position between 4 and 8 open-loop bits, which is where the search is well scaled. Where the
    target cannot be met (INT8 forced after skips may alone exceed it), the nearest end is the answer.

    Args:
        run_once: threshold -> average activation bits of a run, falling in the threshold.
        target: asked-for bits.
        theta_of_bits: open-loop bits (4 to 8) -> threshold.
        tolerance: of the average bits.
        max_runs: runs to spend at most.
    """
    low: tuple[float, float] | None = None  # (open-loop bits, measured bits) below the target
    high: tuple[float, float] | None = None  # above it
    nominal, best = target, None
    for runs in range(1, max_runs + 1):
        theta = theta_of_bits(nominal)
        bits = run_once(theta)
        if best is None or abs(bits - target) < abs(best.bits - target):
            best = ThetaSolution(theta, bits, runs)
        if abs(bits - target) <= tolerance:
            break
        if bits > target:
            high = (nominal, bits)
        else:
            low = (nominal, bits)
        following = _next_nominal(low, high, target)
        if following == nominal:
            break
        nominal = following
    return replace(best, runs=runs)


def trials(bits: Iterable[float], errors: Sequence[str] = ("excess",)) -> list[Trial]:
    """The thresholds that a calibration solves: gamma's without and with the cache, gamma-time's without.

    Args:
        bits: asked-for average bits.
        errors: members of `config.ERRORS`; the paper preset needs "paper".
    """
    found: list[Trial] = []
    for asked in map(float, bits):
        found += [(DMPQConfig("gamma", asked, error=error), on) for error in errors for on in (False, True)]
        found.append((DMPQConfig(GAMMA_TIME, asked), False))
    return found


def solve_thetas(
    predictor: Predictor,
    records: Sequence[LinearRecord],
    run_once: Callable[[DMPQConfig, bool], float],
    bits: Iterable[float],
    errors: Sequence[str] = ("excess",),
    tolerance: float = 0.03,
) -> Predictor:
    """The predictor with thresholds for every one of `trials`.

    Args:
        predictor: of `fit_predictor`.
        records: those that it was fitted on.
        run_once: (config with its `theta` set, whether the cache is on) -> average activation bits.
        bits, errors: as in `trials`.
        tolerance: of the average bits.
    """
    theta: dict[str, dict[str, float]] = {key: dict(row) for key, row in predictor.theta.items()}
    for config, cache_on in trials(bits, errors):
        predicted = _predicted(records, predictor, config)
        solution = solve_theta(
            lambda value, config=config, on=cache_on: run_once(replace(config, theta=value), on),
            config.bits,
            lambda nominal, predicted=predicted: _split_at(predicted, nominal),
            tolerance,
        )
        theta.setdefault(str(config.bits), {})[theta_key(config, cache_on)] = solution.theta
    return replace(predictor, theta=theta)


def _predicted(
    records: Sequence[LinearRecord], predictor: Predictor, config: DMPQConfig
) -> list[tuple[float, int]]:
    """(error that the router predicts, MACs) of every record that has a Γ, greatest error first."""
    predicted = []
    for record in records:
        if record.gamma is not None:
            fit = predictor.linears[linear_name(record.block, record.kind)]
            if config.router == GAMMA_TIME:
                error = fit.timed.at(record.gamma, record.progress)
            else:
                error = (fit.paper if config.error == "paper" else fit.excess).at(record.gamma)
            predicted.append((error, fit.macs))
    return sorted(predicted, reverse=True)


def _split_at(predicted: Sequence[tuple[float, int]], bits: float) -> float:
    """The threshold above which just so many MACs lie that they make `bits`."""
    budget = (bits - 4.0) / 4.0 * sum(macs for _, macs in predicted)
    margin = max(abs(predicted[0][0]), abs(predicted[-1][0]), 1e-6)
    above = predicted[0][0] + margin  # the last threshold under which every choice so far is INT8
    for value, macs in predicted:
        if budget < macs / 2:
            return (above + value) / 2
        budget -= macs
        above = value
    return above - margin


def _next_nominal(low: tuple[float, float] | None, high: tuple[float, float] | None, target: float) -> float:
    if low is None or high is None:
        (nominal, bits), end = (high, 4.0) if low is None else (low, 8.0)
        step = 1.5 * (target - bits)  # a little beyond, to bracket the target
        return max(nominal + step, end) if end == 4.0 else min(nominal + step, end)
    share = (target - low[1]) / (high[1] - low[1])
    return low[0] + min(max(share, 0.1), 0.9) * (high[0] - low[0])
