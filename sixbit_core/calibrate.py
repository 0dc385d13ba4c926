"""Fit a predictor to calibration runs.

Per linear a least-squares line is fitted to the error e(t) over Γ(t−1) (`calibration_run` defines and records
both), and a plane over Γ(t−1) and progress. `thresholds` then solves θ on whole runs. Source: 6Bit-Diffusion
(arXiv 2603.18742), DMPQ; the plane is ours.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

from .calibration_run import BlockRecord, LinearRecord
from .fits import MAGNITUDES, PROGRESS_BINS, BlockFit, Line, LinearFit, Plane
from .layout import BlockLayout
from .predictor import Predictor
from .router_tables import progress_bin

OUTLIER_PERCENTILE = 0.99
RIDGE = 0.01  # weight of the squared slopes over standardised Γ and progress, as a share of the rows
_SMALLEST_GROWTH = 1e-6  # so that a residual of 0 does not end all that follows
LEAST_R2 = 0.1  # of a plane; below it the mean is taken


def fit_predictor(
    records: Sequence[LinearRecord],
    layout: BlockLayout,
    family: str,
    fingerprint: str,
    calibration: dict[str, object],
    blocks: Sequence[BlockRecord] = (),
) -> Predictor:
    """Fit every linear's lines; thresholds are still to be solved (`thresholds`).

    PDR limits are the 99th percentile of the outlier ratios of each kind.

    Args:
        records: of all calibration runs.
        layout: the model's block linears.
        family, fingerprint, calibration: written to the predictor as they are.
        blocks: of all calibration runs; without them skipping knows nothing of the blocks.

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
    fits = tuple(
        fit_block([r for r in blocks if r.block == n]) for n in range(layout.blocks if blocks else 0)
    )
    return Predictor(family, fingerprint, calibration, linears, limits, blocks=fits)


def fit_line(x: Sequence[float], y: Sequence[float]) -> Line:
    """Least squares of `y` on `x`; level and with R² 0 where `x` does not vary."""
    mean_x, mean_y = _mean(x), _mean(y)
    xx = math.fsum((a - mean_x) ** 2 for a in x)
    xy = math.fsum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    yy = math.fsum((b - mean_y) ** 2 for b in y)
    if xx == 0.0 or yy == 0.0:
        return Line(0.0, mean_y, 0.0)
    return Line(xy / xx, mean_y - xy / xx * mean_x, xy * xy / (xx * yy))


def fit_plane(gammas: Sequence[float], progress: Sequence[float], y: Sequence[float]) -> Plane:
    """Ridge regression of `y` on Γ and progress: with both standardised to u and v,

        min Σ (y − mean − a·u − b·v)² + RIDGE·n·(a² + b²)

    R² is that of these slopes. Where it is below `LEAST_R2` the slopes are 0: the mean serves.
    """
    (u, mean_u, scale_u), (v, mean_v, scale_v) = _standardised(gammas), _standardised(progress)
    mean = _mean(y)
    deviations = [value - mean for value in y]
    uv, uy, vy = (
        _mean([p * q for p, q in zip(*pair, strict=True)])
        for pair in ((u, v), (u, deviations), (v, deviations))
    )
    uu, vv = (_mean([p * p for p in x]) + RIDGE for x in (u, v))
    determinant = uu * vv - uv * uv
    a, b = (vv * uy - uv * vy) / determinant, (uu * vy - uv * uy) / determinant
    spread = math.fsum(d * d for d in deviations)
    left = math.fsum((d - a * p - b * q) ** 2 for d, p, q in zip(deviations, u, v, strict=True))
    r2 = 1.0 - left / spread if spread > 0.0 else 0.0
    if r2 < LEAST_R2:
        return Plane(0.0, 0.0, mean, r2)
    alpha, slope = a / scale_u, b / scale_v
    return Plane(alpha, slope, mean - alpha * mean_u - slope * mean_v, r2)


def fit_block(records: Sequence[BlockRecord]) -> BlockFit:
    """Mean Γ of one block, and the size of its residual through sampling.

    Growths are averaged over the runs at each evaluation, multiplied up, and brought to evenly spaced points.
    """
    growths: dict[float, list[float]] = {}
    for record in records:
        growths.setdefault(record.progress, []).append(1.0 if record.growth is None else record.growth)
    known, size = [], 1.0
    for progress, values in sorted(growths.items()):
        size *= max(_mean(values), _SMALLEST_GROWTH)
        known.append((progress, size))
    points = tuple(_interpolated(known, n / MAGNITUDES) for n in range(MAGNITUDES))
    return BlockFit(_mean([record.gamma for record in records]), points)


def _interpolated(known: Sequence[tuple[float, float]], at: float) -> float:
    """The value at `at` of points (place, value) in order; beyond the ends that of the end."""
    for (low, before), (high, after) in pairwise(known):
        if at < high:
            return before + (after - before) * max(at - low, 0.0) / (high - low)
    return known[-1][1]


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
        timed=fit_plane(gammas, [r.progress for r in known], [r.excess for r in known]),
    )


def _standardised(x: Sequence[float]) -> tuple[list[float], float, float]:
    """`x` with mean 0 and variance 1 (all 0 where it does not vary), its mean and its standard deviation."""
    mean = _mean(x)
    scale = math.sqrt(_mean([(value - mean) ** 2 for value in x])) or 1.0
    return [(value - mean) / scale for value in x], mean, scale


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _percentile(values: Sequence[float], share: float) -> float:
    """Nearest-rank percentile."""
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)]
