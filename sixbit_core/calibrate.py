"""Fit a predictor to calibration runs, and solve the thresholds that give the asked-for bits.

Per linear a least-squares line is fitted to the error e(t) over Γ(t−1) (`calibration_run` defines and
records both). θ is then solved closed-loop on whole runs, INT8 that is forced by a missing Γ included,
once without and once with the delta cache. Source: 6Bit-Diffusion (arXiv 2603.18742), DMPQ.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from .calibration_run import CalibrationRun, LinearRecord
from .config import DMPQConfig
from .layout import BlockLayout, linear_name
from .predictor import PROGRESS_BINS, Line, LinearFit, Predictor, theta_key
from .router import progress_bin

__all__ = [
    "CalibrationRun",
    "LinearRecord",
    "ThetaSolution",
    "fit_line",
    "fit_predictor",
    "open_loop_theta",
    "solve_theta",
    "solve_thetas",
]

OUTLIER_PERCENTILE = 0.99


def fit_predictor(
    records: Sequence[LinearRecord],
    layout: BlockLayout,
    family: str,
    fingerprint: str,
    calibration: dict[str, object],
) -> Predictor:
    """Fit every linear's lines; thresholds are still to be solved (`solve_thetas`).

    PDR limits are the 99th percentile of the outlier ratios of each kind.

    Args:
        records: of all calibration runs.
        layout: the model's block linears.
        family, fingerprint, calibration: written to the predictor as they are.

    Raises:
        ValueError: if a linear has fewer than 3 evaluations with a Γ before them.
    """
    by_linear: dict[tuple[int, str], list[LinearRecord]] = {}
    by_kind: dict[str, list[float]] = {}
    for record in records:
        by_linear.setdefault((record.block, record.kind), []).append(record)
        by_kind.setdefault(record.kind, []).append(record.ratio)
    linears = {}
    for name, block, kind in layout.linear_names():
        found = by_linear.get((block, kind), [])
        usable = sum(record.gamma is not None for record in found)
        if usable < 3:
            raise ValueError(f"{name} has {usable} evaluations to fit, at least 3 are needed: use more steps")
        linears[name] = _fit_linear(found, layout.macs(block, kind))
    limits = {kind: _percentile(ratios, OUTLIER_PERCENTILE) for kind, ratios in by_kind.items()}
    return Predictor(family, fingerprint, calibration, linears, limits)


def fit_line(x: Sequence[float], y: Sequence[float]) -> Line:
    """Least squares of `y` on `x`; level and with R² 0 where `x` does not vary."""
    mean_x, mean_y = _mean(x), _mean(y)
    xx = math.fsum((a - mean_x) ** 2 for a in x)
    xy = math.fsum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    yy = math.fsum((b - mean_y) ** 2 for b in y)
    if xx == 0.0 or yy == 0.0:
        return Line(0.0, mean_y, 0.0)
    return Line(xy / xx, mean_y - xy / xx * mean_x, xy * xy / (xx * yy))


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
        theta_of_bits: open-loop bits (4 to 8) -> threshold, see `open_loop_theta`.
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


def solve_thetas(
    predictor: Predictor,
    records: Sequence[LinearRecord],
    run_once: Callable[[DMPQConfig, bool], float],
    bits: Iterable[float],
    errors: Sequence[str] = ("excess",),
) -> Predictor:
    """The predictor with thresholds for every asked-for bits, without and with the cache.

    Args:
        predictor: of `fit_predictor`.
        records: those that it was fitted on.
        run_once: (config with its `theta` set, whether the cache is on) -> average activation bits.
        bits: asked-for average bits.
        errors: members of `config.ERRORS`; the paper preset needs "paper".
    """
    theta: dict[str, dict[str, float]] = {key: dict(row) for key, row in predictor.theta.items()}
    for asked in bits:
        row = theta.setdefault(str(float(asked)), {})
        for error in errors:
            for cache_on in (False, True):
                config = DMPQConfig(router="gamma", bits=float(asked), error=error)
                solution = solve_theta(
                    lambda value, config=config, on=cache_on: run_once(replace(config, theta=value), on),
                    float(asked),
                    lambda nominal, error=error: open_loop_theta(records, predictor, nominal, error),
                )
                row[theta_key(error, cache_on)] = solution.theta
    return replace(predictor, theta=theta)


def open_loop_theta(
    records: Sequence[LinearRecord], predictor: Predictor, bits: float, error: str = "excess"
) -> float:
    """The threshold that would give `bits` if the calibration runs' Γ came again; always finite."""
    predicted = []
    for record in records:
        if record.gamma is not None:
            fit = predictor.linears[linear_name(record.block, record.kind)]
            line = fit.paper if error == "paper" else fit.excess
            predicted.append((line.at(record.gamma), fit.macs))
    predicted.sort(reverse=True)
    budget = (bits - 4.0) / 4.0 * sum(macs for _, macs in predicted)
    margin = max(abs(predicted[0][0]), abs(predicted[-1][0]), 1e-6)
    above = predicted[0][0] + margin  # the last threshold under which every choice so far is INT8
    for value, macs in predicted:
        if budget < macs / 2:
            return (above + value) / 2
        budget -= macs
        above = value
    return above - margin


def _fit_linear(records: Sequence[LinearRecord], macs: int) -> LinearFit:
    known = [record for record in records if record.gamma is not None]
    gammas = [record.gamma for record in known]
    paper = [record.paper for record in known if record.paper is not None]
    excess = _mean([record.excess for record in records])
    bins: list[list[float]] = [[] for _ in range(PROGRESS_BINS)]
    for record in records:
        bins[progress_bin(record.progress)].append(record.excess)
    return LinearFit(
        excess=fit_line(gammas, [record.excess for record in known]),
        paper=fit_line(gammas, paper) if len(paper) == len(known) else None,
        error_nvfp4=_mean([record.error_nvfp4 for record in records]),
        error_int8=_mean([record.error_int8 for record in records]),
        error_by_progress=tuple(_mean(values) if values else excess for values in bins),
        macs=macs,
    )


def _next_nominal(low: tuple[float, float] | None, high: tuple[float, float] | None, target: float) -> float:
    if low is None or high is None:
        (nominal, bits), end = (high, 4.0) if low is None else (low, 8.0)
        step = 1.5 * (target - bits)  # a little beyond, to bracket the target
        return max(nominal + step, end) if end == 4.0 else min(nominal + step, end)
    share = (target - low[1]) / (high[1] - low[1])
    return low[0] + min(max(share, 0.1), 0.9) * (high[0] - low[0])


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _percentile(values: Sequence[float], share: float) -> float:
    """Nearest-rank percentile."""
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)]
