"""What a block does in an evaluation, decided from what earlier evaluations measured.

Pure host arithmetic: `BlockMemory` is what is known of a block, `plan_blocks` decides from all of them.
Skipping comes first (TDC), for neighbouring blocks together where the config asks for it, then the router
(DMPQ); on the first computed evaluation after a skip PDR raises what the router chose: bf16 for a linear
whose input has outliers, INT8 for the others.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from .config import DeltaCacheConfig
from .formats import FORMATS
from .observe import NonFiniteError, Reading
from .router import ROUTERS
from .router_tables import Place, RouterTables
from .skip import SKIP_POLICIES, Observation

INPUT_OF = {"k": "q", "v": "q"}
"""Linears that share another's input: its outlier ratio is measured once."""


@dataclass(frozen=True)
class Moment:
    """Where sampling stands in an evaluation."""

    evaluation: int
    progress: float  # share of sampling done, in [0, 1]
    last: bool


@dataclass
class BlockMemory:
    """What is known of a block between evaluations; maxima over all streams.

    Attributes:
        gamma: Γ of the evaluation before, None if the block was skipped in it.
        change: r of the last two computed evaluations; None unless every stream has two residuals.
        accumulated: E_acc.
        consecutive: skips since the block last ran.
        ratios: outlier ratio of the linears' inputs, by kind, from the last computed evaluation.
    """

    gamma: float | None = None
    change: float | None = None
    accumulated: float = 0.0
    consecutive: int = 0
    ratios: dict[str, float] = field(default_factory=dict)

    def computed(self, gammas: Iterable[float], changes: Iterable[float], ratios: dict[str, float]) -> None:
        """Learn from an evaluation in which the block ran; a change that is not finite is not known."""
        self.gamma = max(gammas, default=None)
        self.change = _all_known(changes)
        self.accumulated, self.consecutive, self.ratios = 0.0, 0, ratios

    def skipped(self, newcomers: bool) -> None:
        """Learn from an evaluation in which it was skipped; `newcomers` have no change yet."""
        self.accumulated += self.change or 0.0
        self.consecutive += 1
        self.gamma = None
        if newcomers:
            self.change = None


@dataclass(frozen=True)
class BlockPlan:
    """What a block does: shared by all streams of the evaluation.

    Attributes:
        skip: answer with the kept residual.
        refresh: first computed evaluation after a skip.
        formats: activation format by linear kind; empty where linears are left alone.
    """

    skip: bool
    refresh: bool
    formats: Mapping[str, str]


def plan_blocks(
    memories: Sequence[BlockMemory],
    now: Moment,
    cache: DeltaCacheConfig | None,
    tables: RouterTables | None,
    tolerances: Sequence[float] | None = None,
) -> list[BlockPlan]:
    """Decide what every block does.

    Args:
        memories: what is known of each.
        now: where sampling stands.
        cache: skip settings, None never skips.
        tables: of the router, None leaves linears alone.
        tolerances: what each block's threshold is multiplied by under a policy that asks for it; None for 1.
    """
    tolerances = tolerances or [1.0] * len(memories)
    size = (cache.group if cache else 1) or len(memories)
    plans = []
    for first in range(0, len(memories), size):
        members = memories[first : first + size]
        skip = _may_skip(members, first, now, cache, fmean(tolerances[first : first + size]))
        for block, memory in enumerate(members, first):
            refresh = not skip and memory.consecutive > 0
            formats = {} if tables is None else _formats(memory, block, now, refresh, tables)
            plans.append(BlockPlan(skip, refresh, formats))
    return plans


def learn(
    memories: Sequence[BlockMemory], plans: Sequence[BlockPlan], readings: Iterable[Reading], evaluation: int
) -> None:
    """Take the measures of an evaluation into the memories of all blocks.

    Args:
        memories, plans: one per block.
        readings: ("block", block, evaluations since its kept Δ) -> Γ and, where there was a Δ, its change,
            one reading a stream; ("outliers", block, kind) -> ratio, one a stream.
        evaluation: for the message.

    Raises:
        NonFiniteError: for the first block whose Γ is not finite.
    """
    seen = [_Measures() for _ in memories]
    for (what, block, detail), values in readings:
        if what == "block":
            seen[block].gammas.append(values[0])
            seen[block].changes.append(values[1] / detail if len(values) > 1 else math.nan)
        else:
            seen[block].ratios[detail] = max(values[0], seen[block].ratios.get(detail, 0.0))
    for block, (memory, plan, measures) in enumerate(zip(memories, plans, seen, strict=True)):
        if not all(map(math.isfinite, measures.gammas)):
            raise NonFiniteError(
                f"evaluation {evaluation}, block {block}: the output is not finite (NaN or infinity); a "
                "model that overflows in float16 must run in bfloat16 or float32"
            )
        if plan.skip:
            memory.skipped(newcomers=bool(measures.gammas))
        else:
            memory.computed(measures.gammas, measures.changes, measures.ratios)


@dataclass
class _Measures:
    """One block's measures of one evaluation, over all streams."""

    gammas: list[float] = field(default_factory=list)
    changes: list[float] = field(default_factory=list)
    ratios: dict[str, float] = field(default_factory=dict)


def _may_skip(
    members: Sequence[BlockMemory], first: int, now: Moment, cache: DeltaCacheConfig | None, tolerance: float
) -> bool:
    changes = [memory.change for memory in members if memory.change is not None]
    if cache is None or now.last or len(changes) < len(members):
        return False
    seen = Observation(
        first,
        now.evaluation,
        now.progress,
        fmean(changes),
        fmean(memory.accumulated for memory in members),
        max(memory.consecutive for memory in members),
        tolerance,
    )
    return SKIP_POLICIES[cache.policy](seen, cache)


def _formats(
    memory: BlockMemory, block: int, now: Moment, refresh: bool, tables: RouterTables
) -> dict[str, str]:
    route = ROUTERS[tables.config.router]
    formats = {
        kind: route(Place(now.evaluation, now.progress, block, kind, memory.gamma, now.last), tables)
        for kind in tables.layout.names
    }
    if not (refresh and tables.config.purified_refresh):
        return formats
    return {kind: _finer(name, _purified(memory, kind, tables)) for kind, name in formats.items()}


def _purified(memory: BlockMemory, kind: str, tables: RouterTables) -> str:
    ratio = memory.ratios.get(INPUT_OF.get(kind, kind))
    return "bf16" if ratio is not None and ratio > tables.outlier_limit(kind) else "int8"


def _finer(one: str, other: str) -> str:
    return max(one, other, key=lambda name: FORMATS[name].bits)


def _all_known(values: Iterable[float]) -> float | None:
    values = list(values)
    return max(values) if values and all(map(math.isfinite, values)) else None
