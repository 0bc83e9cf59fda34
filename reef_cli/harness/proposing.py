"""What a proposer of harness edits is given and gives back; and how one is found by its dotted path.

A proposer reads a window of experience and the tree in force, and answers with mutations or with the reason why there are none.
It publishes nothing and judges nothing: what it says is admitted, measured, and undone when it is no good.
"""

import importlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from reef_cli.core.errors import ConfigError
from reef_cli.core.types import Sample
from reef_cli.harness.merge import Mutation
from reef_cli.harness.tree import Tree

Ask = Callable[[Sequence[Mapping[str, Any]], int, float], Awaitable[str]]
"""Asks a model: chat messages, most new tokens, temperature. Raises what engines raise, and `OnlyReasoning`."""


class OnlyReasoning(Exception):
    """The model spent all its tokens on reasoning and answered nothing. `tokens` is how many it was given."""

    def __init__(self, tokens: int) -> None:
        super().__init__(
            f"the model spent its whole budget of {tokens} tokens on reasoning and answered nothing; "
            "raise max_tokens in reef.proposer_settings"
        )


@dataclass(frozen=True, slots=True)
class Evidence:
    """One thing somebody said about the agent: a run that failed, or a request in words.

    `messages` are the conversation of the run, `answer` its last words. All text in it is data of strangers.
    """

    id: str
    kind: Literal["failure", "request"] = "failure"
    feedback: str = ""
    score: float | None = None
    session: str = ""
    prompt: str = ""
    answer: str = ""
    messages: tuple[Mapping[str, Any], ...] = ()

    @classmethod
    def of(cls, sample: Sample) -> "Evidence":
        """From a sample's `extras`, where the recipe put it."""
        given = sample.extras
        messages = tuple(given.get("messages", ()))
        return cls(
            id=str(sample.id),
            kind="request" if given.get("kind") == "request" else "failure",
            feedback=str(given.get("feedback", "")),
            score=given.get("score"),
            session=str(given.get("session", "")),
            prompt=str(given.get("prompt", "")),
            answer=str(given.get("answer", "")),
            messages=messages,
        )


@dataclass(frozen=True, slots=True)
class Past:
    """An earlier proposal and what became of it."""

    mutations: tuple[Mapping[str, Any], ...]
    outcome: str
    reason: str


@dataclass(frozen=True, slots=True)
class Window:
    """Everything a proposer may look at."""

    tree: Tree
    evidence: tuple[Evidence, ...]
    history: tuple[Past, ...] = ()


@dataclass(frozen=True, slots=True)
class Proposed:
    """Mutations that stand or fall together; none of them with the reason why."""

    mutations: tuple[Mutation, ...] = ()
    reason: str = ""
    detail: Mapping[str, Any] = field(default_factory=dict)


class Proposer(Protocol):
    """Made once per deployment with its settings."""

    async def propose(self, window: Window, ask: Ask) -> Proposed: ...


def load(path: str, settings: Mapping[str, Any]) -> Proposer:
    """The proposer at `module:Class`, made with `settings`. `ConfigError` says what is wrong with the path or with them."""
    module, colon, name = path.partition(":")
    try:
        if not colon:
            raise ImportError("it has the form module:Class")
        made: Proposer = getattr(importlib.import_module(module), name)(**settings)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        hint = "reef.proposer names a class, reef.proposer_settings what it is made with"
        raise ConfigError(f"{path} is no proposer that can be made", why=str(error), hint=hint) from error
    if not callable(getattr(made, "propose", None)):
        raise ConfigError(f"{path} has no method propose", hint="see reef_cli/harness/proposing.py")
    return made
