"""What a hard problem is to discovery: a statement, first solutions, a verifier in a process of its own, ways to search.

A `Problem` owns the meaning of a solution (JSON data). A `Space` is one way a model's text becomes a solution: a line of
parameters, a program, guidance for another model. Discovery itself reads nothing out of a solution.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the verifier said. `value` is what the search compares; `strict` allows no tolerance at all."""

    valid: bool
    reason: str
    value: float = 0.0
    strict: float = 0.0
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class State:
    """A solution in the archive. `initial` states are where search may always start again.

    `text` is what made it (a line, a program), `summary` what a policy is told of it.
    """

    id: int
    parent: int | None
    value: float
    initial: bool
    solution: Any
    text: str = ""
    summary: str = ""


class Unusable(Exception):
    """A policy's text that gives no solution; the message is a stable reason. It scores 0 and is a visit all the same."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What a policy's model is asked: a prompt to continue (raw, no chat template), or one message to answer."""

    prompt: str
    chat: bool = False
    max_tokens: int = 64
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Made:
    """A solution a space made, with the text and summary that go with it into the archive."""

    solution: Any
    text: str
    summary: str = ""


class Space(Protocol):
    """One way from a parent and a model's text to a solution."""

    name: str

    def ask(self, parent: State) -> Ask:
        """What to ask for a changed solution."""
        ...

    def make(self, parent: State, text: str, seed: int) -> Made:
        """The solution behind a text. `seed` fixes whatever is random. Raises `Unusable`."""
        ...


class Problem(Protocol):
    """One problem at one size."""

    name: str
    statement: str

    @property
    def verifier(self) -> Sequence[str | Path]:
        """The script and its arguments. It reads a solution as JSON and prints `valid`, `reason`, `value` and `strict`."""
        ...

    def starts(self, count: int, seed: int) -> Sequence[Made]:
        """First solutions, one per group of a step."""
        ...

    def space(self, name: str) -> Space:
        """A search space by name. Raises `ConfigError` for one it does not have."""
        ...

    def same(self, left: float, right: float) -> bool:
        """Whether solutions of these values count as one: a copy of a known solution is no discovery."""
        ...

    def draw(self, solution: Any) -> str:
        """The solution as an SVG element; empty when there is nothing to see."""
        ...
