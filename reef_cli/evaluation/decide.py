"""Deciding by betting: pure functions from paired differences to a conclusion, with stated error rates at any stopping time.

For each item d = candidate's score - current's score, in [-1, 1]. Against the hypothesis "the mean of d is at most m" a gambler
stakes a fraction of the capital on every item; under the hypothesis the capital is a nonnegative supermartingale, so it ever
reaches 1/alpha with probability at most alpha (Ville). Looking after every item and stopping early therefore costs nothing.
The stake is a mixture over a grid (Waudby-Smith and Ramdas 2024, "Estimating means of bounded random variables by betting",
section 4): no tuning, independent of the items' order, ties cost nothing. Binary scores reduce to a mixture sign test.

Two uses: `decide` publishes only what was shown better; `decide_return` (rolling cadence) takes back only what was shown worse
than a margin. Missing items are not in the pairs: they are missing, never zero.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

# Stakes as fractions of the largest safe one. Small ones find small effects in many items, large ones decide one-sided
# results in few; the power table of benchmarks/gate.py compares.
STAKES = (0.03, 0.06, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8, 0.95)
_RESOLUTION = 40  # bisection steps of an interval bound: 2^-40 of the range


class Wealth:
    """The capital of one gambler against "the mean of x is at most 0", for x in [-floor, ...]. Starts at 1."""

    __slots__ = ("_logs", "_stakes")

    def __init__(self, floor: float = 1.0) -> None:
        self._stakes = [stake / floor for stake in STAKES]
        self._logs = [0.0] * len(STAKES)

    def add(self, x: float, times: int = 1) -> None:
        for index, stake in enumerate(self._stakes):
            self._logs[index] += times * math.log1p(stake * x)

    @property
    def log(self) -> float:
        """Natural log of the mixture's capital."""
        top = max(self._logs)
        return top + math.log(math.fsum(math.exp(value - top) for value in self._logs) / len(self._logs))

    @property
    def best(self) -> float:
        """Log capital of the best stake in hindsight: the growth one may hope for."""
        return max(0.0, *self._logs)


@dataclass(frozen=True, slots=True)
class Conclusion:
    """What the pairs show. `log_better` and `log_worse` are log capitals; `needs` about how many more items would decide."""

    result: Literal["better", "worse", "open"]
    pairs: int
    wins: int
    losses: int
    ties: int
    mean: float
    log_better: float
    log_worse: float
    alpha: float
    needs: int | None = None


@dataclass(slots=True)
class Tally:
    """Paired differences gathered so far, as a sequential test sees them. `margin` shifts the "worse" side only."""

    alpha: float = 0.05
    margin: float = 0.0
    better: Wealth = field(init=False)
    worse: Wealth = field(init=False)
    values: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.better = Wealth()
        self.worse = Wealth(1.0 + self.margin)

    def add(self, difference: float) -> None:
        """One more pair; `difference` in [-1, 1]."""
        if not -1.0 <= difference <= 1.0:
            raise ValueError(f"a paired difference lies in [-1, 1], got {difference}")
        self.values.append(difference)
        self.better.add(difference)
        self.worse.add(-self.margin - difference)

    def conclude(self) -> Conclusion:
        wins = sum(value > 0 for value in self.values)
        losses = sum(value < 0 for value in self.values)
        pairs = len(self.values)
        bar = -math.log(self.alpha)
        up, down = self.better.log, self.worse.log
        result: Literal["better", "worse", "open"] = "better" if up >= bar else "worse" if down >= bar else "open"
        mean = math.fsum(self.values) / pairs if pairs else 0.0
        needs = _needs(self.better if mean > 0 else self.worse, pairs, bar) if result == "open" else None
        return Conclusion(result, pairs, wins, losses, pairs - wins - losses, mean, up, down, self.alpha, needs)


def _needs(wealth: Wealth, pairs: int, bar: float) -> int | None:
    """About how many more items, growing as the best stake did so far, reach the bar; None when nothing grows."""
    rate = wealth.best / pairs if pairs else 0.0
    if rate < 1e-4:
        return None
    return max(1, math.ceil((bar - wealth.log) / rate))


def decide(differences: Iterable[float], alpha: float = 0.05) -> Conclusion:
    """Whether the candidate is better (chance of a wrong "better" at most `alpha`), worse (the same), or neither is shown."""
    return _run(differences, alpha, 0.0)


def decide_return(differences: Iterable[float], margin: float, alpha: float = 0.05) -> Conclusion:
    """Whether the candidate is worse by more than `margin`; chance of a wrong "worse" at most `alpha`."""
    return _run(differences, alpha, margin)


def _run(differences: Iterable[float], alpha: float, margin: float) -> Conclusion:
    tally = Tally(alpha, margin)
    for difference in differences:
        tally.add(difference)
        conclusion_due = max(tally.better.log, tally.worse.log) >= -math.log(alpha)
        if conclusion_due:
            break
    return tally.conclude()


def interval(differences: Sequence[float], alpha: float = 0.05) -> tuple[float, float]:
    """The `1 - alpha` confidence sequence for the mean of d at this moment: valid at every stopping time, never empty."""
    counts = tuple(sorted(Counter(differences).items()))
    if not counts:
        return -1.0, 1.0
    mean = math.fsum(value * times for value, times in counts) / len(differences)
    return _bound(counts, mean, alpha / 2, -1), _bound(counts, mean, alpha / 2, 1)


def _bound(counts: tuple[tuple[float, int], ...], mean: float, alpha: float, side: Literal[-1, 1]) -> float:
    """The mean furthest to `side` that the bets do not refute; the capital is monotone in the hypothesis there."""
    bar = -math.log(alpha)
    kept, refuted = mean, float(side)
    if _capital(counts, refuted, side) < bar:
        return refuted
    for _ in range(_RESOLUTION):
        middle = (kept + refuted) / 2
        if _capital(counts, middle, side) < bar:
            kept = middle
        else:
            refuted = middle
    return kept


@lru_cache(maxsize=1024)
def _capital(counts: tuple[tuple[float, int], ...], mean: float, side: Literal[-1, 1]) -> float:
    """Log capital against "the true mean is at least (side 1) / at most (side -1) `mean`"."""
    wealth = Wealth(max(1e-9, 1.0 - side * mean))
    for value, times in counts:
        wealth.add(side * (mean - value), times)
    return wealth.log


@lru_cache(maxsize=65536)
def binary_result(wins: int, losses: int, alpha: float = 0.05) -> Literal["better", "worse", "open"]:
    """The result of binary pairs at this moment; ties do not matter. For simulations: same numbers as `decide`, cached."""
    up, down = Wealth(), Wealth()
    up.add(1.0, wins)
    up.add(-1.0, losses)
    down.add(1.0, losses)
    down.add(-1.0, wins)
    bar = -math.log(alpha)
    return "better" if up.log >= bar else "worse" if down.log >= bar else "open"
