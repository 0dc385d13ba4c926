"""TDC's rule, and others to hold it against: SKIP_POLICIES, name -> (observation, config) -> skip?

The paper's rule skips block l at evaluation t when E_acc + r < τ, with r the relative change of its
residual per evaluation between the last two computed ones, and E_acc the sum of r over the skips since
then. Add a policy by writing one decorated function. What no policy may override is asked before it:
two residuals of every stream exist, and the evaluation is not the last.

    error-budget  the paper's rule
    block-budget  the same with τ for each block, from calibration
    random        skip with probability τ
    uniform       skip a share τ of the evaluations, evenly spaced
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass

from .config import DeltaCacheConfig


@dataclass(frozen=True)
class Observation:
    """What is known about a block before evaluation t; maxima over all streams.

    Of blocks that are skipped together: the first one's number, means of the others' values.
    """

    block: int
    evaluation: int
    progress: float  # share of sampling done, in [0, 1]
    change: float  # r: relative L2 change of the residual per evaluation, from the last two computed ones
    accumulated: float  # E_acc: change summed over the skips since the block last ran
    consecutive: int  # skips in a row so far
    tolerance: float = 1.0  # what calibration multiplies the block's threshold by


SkipPolicy = Callable[[Observation, DeltaCacheConfig], bool]
SKIP_POLICIES: dict[str, SkipPolicy] = {}
BLOCK_BUDGET = "block-budget"


def skip_policy(name: str) -> Callable[[SkipPolicy], SkipPolicy]:
    """Decorator: offer a policy under `name`."""

    def register(policy: SkipPolicy) -> SkipPolicy:
        SKIP_POLICIES[name] = policy
        return policy

    return register


@skip_policy("error-budget")
def within_budget(seen: Observation, config: DeltaCacheConfig) -> bool:
    """Skip while the accumulated change stays under the threshold (TDC of the paper)."""
    return _allowed(seen, config) and seen.accumulated + seen.change < config.threshold


@skip_policy(BLOCK_BUDGET)
def within_own_budget(seen: Observation, config: DeltaCacheConfig) -> bool:
    """Skip while the accumulated change stays under the block's own threshold (ours)."""
    return _allowed(seen, config) and seen.accumulated + seen.change < config.threshold * seen.tolerance


@skip_policy("random")
def at_random(seen: Observation, config: DeltaCacheConfig) -> bool:
    """Skip with probability `threshold`, drawn from a hash: what TDC must beat at equal skips."""
    drawn = hashed_unit("skip", config.seed, seen.evaluation, seen.block)
    return _allowed(seen, config) and drawn < config.threshold


@skip_policy("uniform")
def evenly(seen: Observation, config: DeltaCacheConfig) -> bool:
    """Skip the same share `threshold` of the evaluations in every block, evenly spaced."""
    return _allowed(seen, config) and is_turn(seen.evaluation, config.threshold)


def hashed_unit(*parts: object) -> float:
    """A number in [0, 1) that depends on `parts` alone: the same on every machine and in every run."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53


def is_turn(count: int, share: float) -> bool:
    """Whether `count` is one of the evenly spaced numbers 0, 1, … that make up `share` of them."""
    return math.floor((count + 1) * share) > math.floor(count * share) if 0 < share < 1 else share >= 1


def _allowed(seen: Observation, config: DeltaCacheConfig) -> bool:
    return config.start <= seen.progress < config.end and seen.consecutive < config.max_skips
