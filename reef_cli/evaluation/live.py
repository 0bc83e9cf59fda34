"""Comparing two releases by live rewards: unpaired sessions, looked at after each one, with stated error rates.

Sessions of the candidate and of the others come in any order and in any proportion. They are grouped into blocks: a block
closes when it holds sessions of both sides, and counts as one difference of means, in [-1, 1]. Which sessions share a block
depends on their sides and order alone, never on rewards, so under "the candidate's mean is at most the others'" each block's
difference has mean at most 0 given the past, and the bets of `decide` apply as they stand. Comparing within blocks also means
that what changes with time for everybody (harder questions, stricter users) changes both sides of a difference.

Blocks for sequential two-sample tests: Turner, Ly and Grünwald 2024, "Generic E-variables for exact sequential k-sample tests
that allow for optional stopping"; betting on bounded means: Waudby-Smith and Ramdas 2024; two samples by betting: Shekhar and
Ramdas 2023, "Nonparametric two-sample testing by betting". A session counts once: rewards within one are not independent.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from reef_cli.evaluation.decide import Tally, interval


@dataclass(slots=True)
class Side:
    """Rewards of one side: of all sessions, and of those in the open block."""

    sessions: int = 0
    total: float = 0.0
    block: list[float] = field(default_factory=list)

    def add(self, reward: float) -> None:
        self.sessions += 1
        self.total += reward
        self.block.append(reward)

    def close(self) -> float:
        """The block's mean; the next block is empty."""
        mean = math.fsum(self.block) / len(self.block)
        self.block = []
        return mean

    @property
    def mean(self) -> float | None:
        return self.total / self.sessions if self.sessions else None


class LiveTally:
    """Live sessions of a candidate and of what it is compared with. `margin` shifts the "worse" side only."""

    def __init__(self, alpha: float, margin: float = 0.0) -> None:
        self.tally = Tally(alpha, margin)
        self.candidate = Side()
        self.others = Side()

    def add(self, *, candidate: bool, reward: float) -> None:
        """One more session; `reward` in [0, 1]."""
        (self.candidate if candidate else self.others).add(reward)
        if self.candidate.block and self.others.block:
            self.tally.add(self.candidate.close() - self.others.close())

    @property
    def better(self) -> bool:
        """Whether the candidate was shown better; wrong with chance at most alpha, however often one looks."""
        return self.tally.better.log >= -math.log(self.tally.alpha)

    @property
    def worse(self) -> bool:
        """Whether it was shown worse by more than the margin; wrong with chance at most alpha."""
        return self.tally.worse.log >= -math.log(self.tally.alpha)

    def evidence(self) -> Mapping[str, Any]:
        """The numbers of this moment, JSON-safe. The interval is one-sided at alpha on each end, as the tests."""
        conclusion = self.tally.conclude()
        low, high = interval(self.tally.values, 2 * self.tally.alpha)
        return {
            "test": {
                "method": "betting e-process over blocks of sessions, anytime-valid",
                "alpha": self.tally.alpha,
                "margin": self.tally.margin,
            },
            "sessions": {"candidate": self.candidate.sessions, "others": self.others.sessions},
            "blocks": conclusion.pairs,
            "candidate_mean": _rounded(self.candidate.mean),
            "current_mean": _rounded(self.others.mean),
            "difference": _rounded(conclusion.mean),
            "interval": {"low": _rounded(low), "high": _rounded(high), "confidence": 1 - 2 * self.tally.alpha},
            "log_evidence": {
                "better": _rounded(conclusion.log_better),
                "worse": _rounded(conclusion.log_worse),
                "bar": _rounded(-math.log(self.tally.alpha)),
            },
            "needs_about": conclusion.needs,
        }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
