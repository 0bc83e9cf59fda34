"""What a proposed task is worth: how much better it is solved with a hint than without, and which band it falls into.

Regret is the proposer's reward (self-play after SPADE, arXiv:2608.19197): a task nobody needs help with earns nothing, nor does
one that help does not help with.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Band = Literal["mastered", "frontier", "out_of_reach"]


@dataclass(frozen=True, slots=True)
class Trial:
    """Scores in [0, 1] of the attempts at one task, without the hint and with it."""

    plain: tuple[float, ...]
    hinted: tuple[float, ...]

    @property
    def solved(self) -> float:
        """The mean score without the hint."""
        return sum(self.plain) / len(self.plain)

    @property
    def regret(self) -> float:
        """Mean with the hint minus mean without it."""
        return sum(self.hinted) / len(self.hinted) - self.solved

    def band(self, mastered: float, out_of_reach: float) -> Band:
        """By the mean without the hint: above `mastered`, below `out_of_reach`, or between them where learning happens."""
        if self.solved > mastered:
            return "mastered"
        return "out_of_reach" if self.solved < out_of_reach else "frontier"


def trial(metadata: Mapping[str, Any]) -> Trial | None:
    """The trial a report's `plain` and `hinted` tell of; None when they are no lists of scores in [0, 1]."""
    plain, hinted = _scores(metadata.get("plain")), _scores(metadata.get("hinted"))
    return Trial(plain, hinted) if plain and hinted else None


def _scores(value: Any) -> tuple[float, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        return ()
    numbers = [one for one in value if isinstance(one, int | float) and not isinstance(one, bool) and 0 <= one <= 1]
    return tuple(map(float, numbers)) if len(numbers) == len(value) else ()
