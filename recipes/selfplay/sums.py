"""The worked problem of self-play: sums of two numbers. Small models can drive it, and a program can check it.

A proposal is a line `12 + 7`; an attempt is what the model writes after `12 + 7 =`. The hint is the same sum with its numbers
swapped, already solved.
"""

import random
import re
from collections.abc import Sequence
from typing import Protocol

from reef_cli.discovery.problem import Ask


class Problem(Protocol):
    """What is played: tasks are short texts, and an attempt can be checked."""

    starts: Sequence[str]

    def propose(self, shown: Sequence[str]) -> Ask:
        """What a proposer is asked, having seen these tasks."""
        ...

    def task(self, text: str) -> str | None:
        """The task in a proposer's text; None when it is none."""
        ...

    def solve(self, task: str, *, hinted: bool) -> Ask:
        """What a solver is asked."""
        ...

    def grade(self, task: str, text: str) -> float:
        """The score of an attempt, in [0, 1]."""
        ...

    def dice(self, generator: random.Random) -> str:
        """A task drawn at random, for a control without a proposer."""
        ...


class Sums:
    """Sums of two numbers of at most two digits."""

    starts: Sequence[str] = ("3 + 4", "12 + 7", "8 + 9", "25 + 14", "6 + 30", "41 + 8")
    _TASK = re.compile(r"\s*(\d{1,2}) \+ (\d{1,2})\s*")

    def propose(self, shown: Sequence[str]) -> Ask:
        return Ask("Sums to practise:\n" + "\n".join(shown) + "\n", max_tokens=10, stop=("\n",))

    def task(self, text: str) -> str | None:
        found = self._TASK.fullmatch(text.partition("\n")[0])
        return f"{int(found[1])} + {int(found[2])}" if found else None

    def solve(self, task: str, *, hinted: bool) -> Ask:
        left, _, right = task.split()
        help_ = f"{right} + {left} = {self.answer(task)}\n" if hinted else ""
        return Ask(f"2 + 3 = 5\n10 + 6 = 16\n{help_}{task} =", max_tokens=6, stop=("\n",))

    def grade(self, task: str, text: str) -> float:
        return float(text.strip() == str(self.answer(task)))

    @staticmethod
    def answer(task: str) -> int:
        left, _, right = task.split()
        return int(left) + int(right)

    def dice(self, generator: random.Random) -> str:
        return f"{generator.randint(1, 99)} + {generator.randint(1, 99)}"
