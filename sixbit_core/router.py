"""Which activation format a linear uses in an evaluation: ROUTERS, name -> rule.

    gamma:        INT8 where α·Γ(t−1) + β > θ, else NVFP4; INT8 where there is no Γ (DMPQ of the paper)
    gamma-time:   the same with an error predicted from Γ and progress of sampling
    static:       a fixed set of linears is INT8: most error saved per MAC first, up to the asked-for bits
    static-time:  the same choice over pairs (linear, tenth of sampling)
    protect:      the first 8 % of sampling and the last evaluation are INT8; what the asked-for bits leave
                  over goes to a fixed set of linears, as in static
    random:       INT8 with the probability that meets the asked-for bits, from a hash of the place
    int8-protect: INT8, but 16 bits in the first 8 % of sampling and the last evaluation
    int8, nvfp4, bf16:  one format for all

Add a router by writing one decorated function. Source: 6Bit-Diffusion (arXiv 2603.18742) for gamma;
the others are what it must be held against at equal bits.
"""

import math
from collections.abc import Callable
from dataclasses import replace

from .config import DMPQConfig
from .layout import linear_name
from .predictor import GAMMA_TIME, Predictor
from .router_tables import Place, RouterTables, progress_bin
from .skip import hashed_unit, is_turn

Router = Callable[[Place, RouterTables], str]
ROUTERS: dict[str, Router] = {}
AUTO = "auto"
PROTECTED = 0.08  # of sampling, from its start
WITHOUT_NVFP4 = ("int8", "int8-protect", "bf16")


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


@router(GAMMA_TIME)
def by_gamma_and_time(place: Place, tables: RouterTables) -> str:
    """The predicted error of the block's change one evaluation earlier, at this point of sampling."""
    if place.gamma is None:
        return "int8"
    theta = tables.theta  # first: it sees to it that the planes are there
    return "int8" if tables.fit(place).timed.at(place.gamma, place.progress) > theta else "nvfp4"


@router("static")
def by_linear(place: Place, tables: RouterTables) -> str:
    """The same linears in every evaluation."""
    return "int8" if linear_name(place.block, place.kind) in tables.static_split else "nvfp4"


@router("static-time")
def by_linear_and_time(place: Place, tables: RouterTables) -> str:
    """The same linears in every run, chosen anew for each tenth of sampling."""
    key = (linear_name(place.block, place.kind), progress_bin(place.progress))
    return "int8" if key in tables.static_time_split else "nvfp4"


@router("protect")
def by_stage(place: Place, tables: RouterTables) -> str:
    """Start and end of sampling are INT8, and in between those linears that the bits leave room for.

    With N evaluations, P of them protected, the others have b' = (N·bits − 8·P) / (N − P) bits, 4 at least.
    Linears are INT8 in the order of `static` up to b'; the one in which b' falls is so in just as many
    evaluations, evenly spaced, as make the bits exact. N is told by evaluations and progress, so they are
    exact where sampling begins at its start and progresses evenly.
    """
    intervals = tables.int8_intervals
    if _is_protected(place):
        return "int8"
    evaluations = place.evaluation / place.progress
    protected = math.ceil(PROTECTED * evaluations - 1e-6) + 1
    others = evaluations - protected
    room = (evaluations * tables.config.bits - 8 * protected) / others if others > 0 else tables.config.bits
    share = (room - 4.0) / 4.0
    low, high = intervals[linear_name(place.block, place.kind)]
    return "int8" if is_turn(place.evaluation, (share - low) / (high - low)) else "nvfp4"


@router("int8-protect")
def by_stage_from_int8(place: Place, tables: RouterTables) -> str:
    """Start and end of sampling are in 16 bits, all else in INT8."""
    return "bf16" if _is_protected(place) else "int8"


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


def _is_protected(place: Place) -> bool:
    return place.progress < PROTECTED or place.last


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
