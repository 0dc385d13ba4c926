"""What routes are decided from: the place of a linear, and tables made of the calibration once a run.

The splits are knapsacks under a budget of bits, solved greedily by the error that INT8 saves per MAC.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from .config import PAPER_OUTLIER_LIMIT, DMPQConfig
from .fits import PROGRESS_BINS, LinearFit
from .layout import BlockLayout, linear_name
from .predictor import GAMMA_TIME, Predictor

Gain = tuple[Hashable, float, int]  # what may run in INT8, the error that this saves, its MACs


@dataclass(frozen=True)
class Place:
    """One linear in one evaluation, and what is known of its block before it runs."""

    evaluation: int
    progress: float  # share of sampling done, in [0, 1]
    block: int
    kind: str
    gamma: float | None  # Γ of the evaluation before, maximum over streams; None if the block did not run
    last: bool = False  # whether it is the last evaluation


@dataclass(frozen=True)
class RouterTables:
    """What a run's routes are decided from, besides the place. Built once a run."""

    config: DMPQConfig
    layout: BlockLayout
    predictor: Predictor | None
    cache_on: bool

    def fit(self, place: Place) -> LinearFit:
        """Calibration of the place's linear."""
        return self.calibrated.linears[linear_name(place.block, place.kind)]

    @property
    def calibrated(self) -> Predictor:
        """The predictor, or ValueError where the run has none."""
        if self.predictor is None:
            raise ValueError(
                f'router "{self.config.router}" needs a predictor for this model and there is none: '
                'calibrate, or choose router "int8"'
            )
        return self.predictor

    def outlier_limit(self, kind: str) -> float:
        """PDR limit of a linear kind: the config's, else the predictor's, else the paper's."""
        if self.config.outlier_limit is not None:
            return self.config.outlier_limit
        return PAPER_OUTLIER_LIMIT if self.predictor is None else self.predictor.outlier_limit(kind)

    @cached_property
    def theta(self) -> float:
        """Threshold of the routers gamma and gamma-time."""
        if self.config.router == GAMMA_TIME:
            if any(fit.timed is None for fit in self.calibrated.linears.values()):
                raise ValueError(
                    "this predictor holds no errors by Γ and progress: calibrate again for gamma-time"
                )
            return self.calibrated.threshold(self.config, False)
        if self.config.error == "paper" and any(f.paper is None for f in self.calibrated.linears.values()):
            raise ValueError(
                "this predictor holds no paper error, since it was calibrated without full-precision "
                "weights: calibrate from the full-precision model, or choose another preset than paper"
            )
        return self.calibrated.threshold(self.config, self.cache_on and self.config.bits_of == "run")

    @cached_property
    def static_split(self) -> frozenset[Hashable]:
        """Native names of the linears that the static router runs in INT8."""
        return int8_split(self._gains, self.config.bits)

    @cached_property
    def static_time_split(self) -> frozenset[Hashable]:
        """(native name, progress bin) that the static-time router runs in INT8."""
        fits = self.calibrated.linears
        if any(not fit.error_by_progress for fit in fits.values()):
            raise ValueError("this predictor holds no errors by progress: calibrate again for static-time")
        pairs = (((n, b), e, f.macs) for n, f in fits.items() for b, e in enumerate(f.error_by_progress))
        return int8_split(pairs, self.config.bits)

    @cached_property
    def int8_intervals(self) -> dict[Hashable, tuple[float, float]]:
        """Native name -> its part of all MACs, as an interval of [0, 1]: most error saved per MAC first."""
        ranked, spent, intervals = by_gain(self._gains), 0, {}
        total = sum(macs for _, _, macs in ranked)
        for name, _, macs in ranked:
            intervals[name] = (spent / total, (spent + macs) / total)
            spent += macs
        return intervals

    @property
    def _gains(self) -> list[Gain]:
        fits = self.calibrated.linears.items()
        return [(name, fit.error_nvfp4 - fit.error_int8, fit.macs) for name, fit in fits]


def progress_bin(progress: float) -> int:
    """Which of `PROGRESS_BINS` equal parts of sampling `progress` lies in."""
    return min(int(progress * PROGRESS_BINS), PROGRESS_BINS - 1)


def by_gain(items: Iterable[Gain]) -> Sequence[Gain]:
    """Most error saved per MAC first, equals by name."""
    return sorted(items, key=lambda item: (-item[1] / item[2], str(item[0])))


def int8_split(items: Iterable[Gain], bits: float) -> frozenset[Hashable]:
    """Choose INT8 members under a budget: a knapsack, solved greedily by gain per MAC.

    Args:
        items: (key, error saved by INT8, MACs).
        bits: mean over MACs of 4 (NVFP4) and 8 (INT8) that must not be exceeded.

    Returns:
        The keys that run in INT8. One that does not fit is passed over and smaller ones are tried.
    """
    members = by_gain(items)
    budget = (bits - 4.0) / 4.0 * sum(macs for _, _, macs in members)
    chosen, spent = [], 0
    for key, _, macs in members:
        if spent + macs <= budget:
            chosen.append(key)
            spent += macs
    return frozenset(chosen)
