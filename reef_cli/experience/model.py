"""Facts the experience log hands out, besides the shared ones in `core.types`.

Rows are light views (no bodies, no tokens) for lists and pages; whole records come from `ExperienceLog.get`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from reef_cli.core.ids import RecordId
from reef_cli.core.types import RecordKind

TrainingMode = Literal["auto", "manual", "hybrid"]
Role = Literal["turn", "title", "compaction", "count_tokens", "side", "retry"]


@dataclass(frozen=True, slots=True)
class Instruction:
    """A person's instruction in words (record kind `train`)."""

    id: RecordId
    scenario: str
    created_at: float
    text: str
    session: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Scenario:
    """One workload. `name` of an archived scenario is its archive label, which no live scenario can have."""

    row: int
    name: str
    recipe: str | None
    mode: TrainingMode
    paused: bool
    created_at: float
    archived_at: float | None = None

    @property
    def training_mode(self) -> TrainingMode:
        """The mode by the name it has on the wire."""
        return self.mode


@dataclass(frozen=True, slots=True)
class RecordRow:
    """A record without its bodies. `sequence` orders a scenario's experience; `parent` is the record this one extends.

    `role` says whether an exchange is a turn of the agent or side traffic; `trainable_tokens` is 0 unless its token trace
    is sound, the exchange complete, and the answer sampled from the whole distribution (no `greedy`, no `truncated_sampling`).
    """

    sequence: int
    id: RecordId
    scenario: str
    kind: RecordKind
    created_at: float
    session: str | None
    parent: int | None
    role: Role | None
    retry_of: int | None
    dialect: str | None
    model: str | None
    release_id: str | None
    weight_version: str | None
    summary: str
    score: float | None
    complete: bool
    finish: str | None
    error: str | None
    prompt_tokens: int
    output_tokens: int
    trainable_tokens: int
    evicted_at: float | None


@dataclass(frozen=True, slots=True)
class SessionRow:
    """A conversation or agent run in a list. `source`: named by the client (`tag`) or found by shared prefix (`prefix`)."""

    session: str
    source: Literal["tag", "prefix"]
    started_at: float
    last_at: float
    records: int
    turns: int
    output_tokens: int
    trainable_tokens: int
    summary: str


@dataclass(frozen=True, slots=True)
class Turn:
    """One exchange in a branch, with the scores and number of the reports that cite it."""

    row: RecordRow
    reports: int
    score: float | None


@dataclass(frozen=True, slots=True)
class Branch:
    """A run of turns without a fork. `forked_from` is the turn (of branch `parent`) after which it left; None at a root.

    Every exchange of a session is in exactly one branch, so trainable tokens add up without counting any twice.
    """

    index: int
    parent: int | None
    forked_from: RecordId | None
    kind: Literal["main", "fork", "root", "side"]
    turns: tuple[Turn, ...]
    trainable_tokens: int


@dataclass(frozen=True, slots=True)
class SessionTree:
    """A session's branches in order of appearance; branch 0 is the first conversation, `retries` are kept apart."""

    scenario: str
    session: str
    branches: tuple[Branch, ...]
    retries: tuple[Turn, ...]

    @property
    def trainable_tokens(self) -> int:
        return sum(branch.trainable_tokens for branch in self.branches)


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened. `cursor` resumes exactly after it."""

    cursor: str
    kind: Literal["record", "job", "release"]
    scenario: str
    at: float
    data: Mapping[str, Any]
