"""Which activation format a linear uses in an evaluation: ROUTERS, name -> rule.

    gamma:        INT8 where α·Γ(t−1) + β > θ, else NVFP4; INT8 where there is no Γ (DMPQ of the paper)
    static:       a fixed set of linears is INT8: most error saved per MAC first, up to the asked-for bits
    static-time:  the same choice over pairs (linear, tenth of sampling)
    random:       INT8 with the probability that meets the asked-for bits, from a hash of the place
    int8, nvfp4, bf16:  one format for all

Add a router by writing one decorated function. Source: 6Bit-Diffusion (arXiv 2603.18742) for gamma;
the others are what it must be held against at equal bits.
"""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from .config import PAPER_OUTLIER_LIMIT, DMPQConfig
from .layout import BlockLayout, linear_name
from .predictor import PROGRESS_BINS, LinearFit, Predictor
from .skip import hashed_unit


@dataclass(frozen=True)
class Place:
    """One linear in one evaluation, and what is known of its block before it runs."""

    evaluation: int
    progress: float  # share of sampling done, in [0, 1]
    block: int
    kind: str
    gamma: float | None  # Γ of the evaluation before, maximum over streams; None if the block did not run


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
        """Threshold of the gamma router."""
        if self.config.error == "paper" and any(f.paper is None for f in self.calibrated.linears.values()):
            raise ValueError(
                "this predictor holds no paper error, since it was calibrated without full-precision "
                "weights: calibrate from the full-precision model, or choose another preset than paper"
            )
        return self.calibrated.threshold(self.config, self.cache_on and self.config.bits_of == "run")

    @cached_property
    def static_split(self) -> frozenset[Hashable]:
        """Native names of the linears that the static router runs in INT8."""
        fits = self.calibrated.linears.items()
        gains = ((name, fit.error_nvfp4 - fit.error_int8, fit.macs) for name, fit in fits)
        return int8_split(gains, self.config.bits)

    @cached_property
    def static_time_split(self) -> frozenset[Hashable]:
        """(native name, progress bin) that the static-time router runs in INT8."""
        fits = self.calibrated.linears
        if any(not fit.error_by_progress for fit in fits.values()):
            raise ValueError("this predictor holds no errors by progress: calibrate again for static-time")
        pairs = (((n, b), e, f.macs) for n, f in fits.items() for b, e in enumerate(f.error_by_progress))
        return int8_split(pairs, self.config.bits)


Router = Callable[[Place, RouterTables], str]
ROUTERS: dict[str, Router] = {}
AUTO = "auto"


def router(name: str) -> Callable[[Router], Router]:
    """Decorator: offer a router under `name`."""

    def register(rule: Router) -> Router:
        ROUTERS[name] = rule
        return rule

    return register


@router("gamma")
def by_gamma(place: Place, tables: RouterTables) -> str:
    """DMPQ: the predicted error of the block's change one evaluation earlier."""
    if place.gamma is None:
        return "int8"
    fit, theta = tables.fit(place), tables.theta  # θ first: it sees to it that the paper's lines are there
    line = fit.paper if tables.config.error == "paper" else fit.excess
    return "int8" if line.at(place.gamma) > theta else "nvfp4"


@router("static")
def by_linear(place: Place, tables: RouterTables) -> str:
    """The same linears in every evaluation."""
    return "int8" if linear_name(place.block, place.kind) in tables.static_split else "nvfp4"


@router("static-time")
def by_linear_and_time(place: Place, tables: RouterTables) -> str:
    """The same linears in every run, chosen anew for each tenth of sampling."""
    key = (linear_name(place.block, place.kind), progress_bin(place.progress))
    return "int8" if key in tables.static_time_split else "nvfp4"


@router("random")
def by_hash(place: Place, tables: RouterTables) -> str:
    """Every linear alike likely, so that MAC-weighted bits meet the asked-for ones in expectation."""
    drawn = hashed_unit("route", tables.config.seed, place.evaluation, place.block, place.kind)
    return "int8" if drawn < (tables.config.bits - 4.0) / 4.0 else "nvfp4"


@router("int8")
def always_int8(place: Place, tables: RouterTables) -> str:
    """W4A8."""
    return "int8"


@router("nvfp4")
def always_nvfp4(place: Place, tables: RouterTables) -> str:
    """W4A4."""
    return "nvfp4"


@router("bf16")
def always_bf16(place: Place, tables: RouterTables) -> str:
    """W4A16."""
    return "bf16"


def resolve_router(config: DMPQConfig, predictor: Predictor | None) -> tuple[DMPQConfig, str | None]:
    """Settle "auto", and check the name.

    Returns:
        The config with the router that will run, and, where "auto" had no predictor, one line to show.

    Raises:
        ValueError: for an unknown router.
    """
    if config.router == AUTO:
        if predictor is not None:
            return replace(config, router="gamma"), None
        note = f"no predictor for this model: INT8 activations (8 bits) in place of {config.bits:g} bits"
        return replace(config, router="int8"), note
    if config.router not in ROUTERS:
        raise ValueError(
            f"router must be one of {', '.join([AUTO, *sorted(ROUTERS)])}, got {config.router!r}"
        )
    return config, None


def progress_bin(progress: float) -> int:
    """Which of `PROGRESS_BINS` equal parts of sampling `progress` lies in."""
    return min(int(progress * PROGRESS_BINS), PROGRESS_BINS - 1)


def int8_split(items: Iterable[tuple[Hashable, float, int]], bits: float) -> frozenset[Hashable]:
    """Choose INT8 members under a budget: a knapsack, solved greedily by gain per MAC.

    Args:
        items: (key, error saved by INT8, MACs).
        bits: mean over MACs of 4 (NVFP4) and 8 (INT8) that must not be exceeded.

    Returns:
        The keys that run in INT8. One that does not fit is passed over and smaller ones are tried.
    """
    members = sorted(items, key=lambda item: (-item[1] / item[2], str(item[0])))
    budget = (bits - 4.0) / 4.0 * sum(macs for _, _, macs in members)
    chosen, spent = [], 0
    for key, _, macs in members:
        if spent + macs <= budget:
            chosen.append(key)
            spent += macs
    return frozenset(chosen)
