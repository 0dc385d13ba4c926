"""Intervals beside every share and mean that is published.

Wilson: centre (p + z²/2n) / (1 + z²/n), half-width z/(1 + z²/n) · sqrt(p(1-p)/n + z²/4n²), z = 1.96
Paired bootstrap: percentiles 2.5 and 97.5 of the mean of resampled pair differences
"""

import math
import random
from collections.abc import Sequence

Z = 1.959963984540054


def wilson(right: int, of: int) -> tuple[float, float]:
    """95 % interval of a share `right / of`. Raises ValueError for `of` < 1."""
    if of < 1:
        raise ValueError(f"wilson needs at least one trial, got {of}")
    share, shrink = right / of, 1 + Z * Z / of
    centre = (share + Z * Z / (2 * of)) / shrink
    half = Z / shrink * math.sqrt(share * (1 - share) / of + Z * Z / (4 * of * of))
    return max(0.0, centre - half), min(1.0, centre + half)


def bootstrap_mean(values: Sequence[float], draws: int = 10000, seed: int = 0) -> tuple[float, float, float]:
    """Mean of `values` (differences of pairs, say) with its 95 % bootstrap interval; draws are fixed."""
    if not values:
        raise ValueError("bootstrap_mean needs at least one value")
    source = random.Random(seed)
    count = len(values)
    means = sorted(sum(source.choices(values, k=count)) / count for _ in range(draws))
    return sum(values) / count, means[int(0.025 * draws)], means[int(0.975 * draws) - 1]
