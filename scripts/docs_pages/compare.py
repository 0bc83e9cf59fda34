"""Whether an arm is ahead of another, in words: one rule for all tables of what was measured, so that no page claims more."""

from collections.abc import Sequence
from dataclasses import dataclass

Interval = Sequence[float] | None


@dataclass(frozen=True)
class Measured:
    """An arm's mean, its 95 % interval (None for a single run), and whether a run is like every other (a frozen model)."""

    name: str
    mean: float
    interval: Interval
    fixed: bool = False

    @property
    def edges(self) -> Interval:
        return (self.mean, self.mean) if self.fixed else self.interval


AHEAD, LEVEL, BEHIND, UNKNOWN = (
    "ahead of {}: the 95 % intervals do not overlap",
    "**not ahead of {}**: the 95 % intervals overlap",
    "**behind {}**: the 95 % intervals do not overlap",
    "not compared with {}: that takes several runs of both",
)


def verdict(own: Measured, other: Measured) -> str:
    """How `own` stands to `other`: ahead only where the intervals do not overlap."""
    if own.edges is None or other.edges is None:
        return UNKNOWN
    if own.edges[0] > other.edges[1]:
        return AHEAD
    return BEHIND if own.edges[1] < other.edges[0] else LEVEL


def sentence(own: Measured, others: Sequence[Measured]) -> str:
    """The verdicts on all others as one sentence."""
    found = {
        kind: [f"`{other.name}`" for other in others if verdict(own, other) == kind] for kind in (AHEAD, LEVEL, BEHIND, UNKNOWN)
    }
    return f"`{own.name}` is {'; '.join(kind.format(', '.join(names)) for kind, names in found.items() if names)}."
