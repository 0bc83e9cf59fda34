"""What a recipe of the surface `harness` says beside the contract: who proposes edits, and how episodes judge them.

`program()` of such a recipe names its proposer (`reef_cli.harness.proposing.Proposer`); `evolution()` says the rest.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Evolution:
    """Agent, tasks and limits of the episodes a candidate is judged by, and what the proposer may ask.

    `attempts` is how often each side works on a coding task.
    `ray` is None (episodes run here) or the address of a Ray cluster, empty for one of this machine's own.
    `engine` is empty (the deployment's own engine) or `{url, model, api_key_file}` of another. At most `promote` failing
    prompts become tasks, graded by `promote_grader`.
    """

    adapter: str
    version: str | None = None
    tasks: str | None = None
    attempts: int = 1
    at_once: int = 2
    seconds: float = 600.0
    requests: int = 40
    tokens: int | None = None
    cost: float | None = None
    unsafe: bool = False
    ray: str | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)
    promote: int = 0
    promote_grader: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class Evolving(Protocol):
    """A recipe that evolves harnesses."""

    def evolution(self) -> Evolution: ...


class Kind:
    """Values of `kind` in the extras of a sample, and keys of the feedback object of reports Reef makes for people's words."""

    FAILURE = "failure"
    """A run that went badly."""

    REQUEST = "request"
    """A change asked for in words."""

    PROPOSAL = "proposal"
    """An edit somebody made: `mutations`, `base_release_id`, `reason`."""
