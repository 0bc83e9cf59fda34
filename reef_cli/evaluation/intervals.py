"""Intervals for one mean at a fixed number of items: Wilson's for yes/no scores, the percentile bootstrap for others."""

import math
import random
from collections.abc import Sequence
from statistics import NormalDist


def wilson(successes: float, count: int, alpha: float = 0.05) -> tuple[float, float]:
    """Wilson's score interval for a share (E. B. Wilson, 1927); (0, 1) without data."""
    if count == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(1 - alpha / 2)
    share = successes / count
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    # At the ends the bounds are exactly 0 and 1; rounding must not say otherwise.
    return (max(0.0, middle - half) if successes else 0.0), (min(1.0, middle + half) if successes < count else 1.0)


def bootstrap(values: Sequence[float], alpha: float = 0.05, *, rounds: int = 2000, seed: int = 0) -> tuple[float, float]:
    """Percentile interval of the mean from `rounds` resamples; (-inf, inf) without data. Same seed, same answer."""
    if not values:
        return -math.inf, math.inf
    draw = random.Random(seed)
    count = len(values)
    means = sorted(math.fsum(draw.choices(values, k=count)) / count for _ in range(rounds))
    cut = int(alpha / 2 * rounds)
    return means[cut], means[rounds - 1 - cut]


def of_scores(scores: Sequence[float], alpha: float = 0.05) -> tuple[float, float]:
    """The interval that fits the scores: Wilson when all are 0 or 1, else the bootstrap clipped to [0, 1]."""
    if all(score in (0.0, 1.0) for score in scores):
        return wilson(sum(scores), len(scores), alpha)
    low, high = bootstrap(scores, alpha)
    return max(0.0, low), min(1.0, high)
