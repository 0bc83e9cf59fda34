"""What a recipe is. A recipe folder holds only what differs between methods; this contract is everything it plugs into.

A recipe has two halves. This half runs in the server and must import in milliseconds: which reports make samples, when a
batch is ready, how steps reach users. The tensor half (`program`) is named by a dotted path and runs only in the trainer
subprocess (`reef_cli.trainer.program.Program`), or, for harness recipes, `proposer` names the code that proposes edits.

Settings are a frozen dataclass; its fields, defaults, types and docstring lines are the user documentation and are checked
against serve.yaml (unknown keys are errors with a suggestion).

Beside `Recipe` there are four abilities; a recipe has one by having its method:

- `Grouping`: samples that train together or not at all. `group(sample)` names the group and how many complete it. A batch
  takes whole groups, oldest first, until it holds `batch_size` samples; incomplete ones wait `group_timeout_s` after their
  last member. A grid of one step is one group: `Group(f"step {s}", groups * rollouts, f"{group}/{rollout}")`, with
  `batch_size` equal to its size and `max_staleness` 0; the inner group stays in the sample's `extras` for the program.
- `Assembling`: what a sample needs of the others of its batch, or of the chat template. `assemble(samples, tools)` runs when a
  job begins and returns the samples with more `extras` (teacher contexts under the names of `Extras`).
- `Deriving`: reports the recipe makes itself from the stream of inferences (judge votes, hints). `observer(scenario, tools)`
  gives an `Observer`; it stores reports with `tools.report` under `derived_id`, and `admit` then sees them as any other.
- `Combining`: one recipe per surface under one name. `members()` are they; the deployment drives each by itself.
"""

import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Protocol, runtime_checkable

from reef_cli.core.clock import Clock, SystemClock
from reef_cli.core.errors import ConfigError
from reef_cli.core.ids import RecordId
from reef_cli.core.ports import Answering, ChatTemplate
from reef_cli.core.types import Cadence, Inference, Report, Sample, Surface
from reef_cli.core.types import Extras as Extras


@dataclass(frozen=True, slots=True)
class Refusal:
    """A report or record that does not train, with a stable reason that is counted and listed."""

    reason: str


@dataclass(frozen=True, slots=True)
class ProgramSpec:
    """The trainer half: dotted path `module:Class` and its JSON-safe settings."""

    path: str
    settings: Mapping[str, Any] = field(default_factory=dict)


class Acquisition(StrEnum):
    """How experience comes about: sought in order to learn, or arising from work that is done anyway."""

    PROACTIVE = "proactive"
    REACTIVE = "reactive"


class Target(StrEnum):
    """What evolves."""

    MODEL = "model"
    HARNESS = "harness"
    BOTH = "both"


@dataclass(frozen=True, slots=True)
class Signal:
    """What is learned from: its form (a score, text, a demonstration) and who gives it."""

    form: str
    source: str

    def __str__(self) -> str:
        return f"{self.form}, from {self.source}"


@dataclass(frozen=True, slots=True)
class RecipeSettings:
    """Settings every recipe has. Recipes extend this dataclass."""

    batch_size: int = 16
    """Samples per training step."""

    max_staleness: int = 4
    """Samples produced more than this many weight publications ago are dropped, alone, and counted."""

    gate_every: int = 8
    """Rolling cadence: full evaluation after this many published steps (and at the end)."""


@dataclass(frozen=True, slots=True)
class GroupSettings(RecipeSettings):
    """Settings of recipes that compare answers to one task with each other."""

    group_size: int = 4
    """Answers per group; a report names its group in `metadata.group` and its place in it in `metadata.rollout`."""

    group_timeout_s: float = 600.0
    """A group that is incomplete this long after its last member is dropped, by name."""

    def __post_init__(self) -> None:
        if self.group_size < 1 or self.batch_size % self.group_size:
            raise ConfigError(
                f"batch_size {self.batch_size} is no multiple of group_size {self.group_size}",
                why="a batch takes whole groups",
                hint=f"batch_size: {max(1, self.batch_size // max(1, self.group_size)) * max(1, self.group_size)}",
            )


class Recipe(Protocol):
    """One learning method, instantiated once per deployment with its checked settings."""

    name: ClassVar[str]
    title: ClassVar[str]
    surface: ClassVar[Surface]
    cadence: ClassVar[Cadence]
    signal: ClassVar[Signal]
    acquisition: ClassVar[Acquisition]
    target: ClassVar[Target]
    settings_type: ClassVar[type[RecipeSettings]]
    settings: RecipeSettings

    def __init__(self, settings: Any) -> None: ...

    def admit(self, report: Report, records: Sequence[Inference], step_of: Mapping[str, int]) -> Sample | Refusal:
        """A sample from one report and the records it cites (in the report's order), or why there is none.

        `step_of` maps every weight version found in the records to its step in the scenario's chain. Pure and quick. The `step`
        of a sample for a harness is set by who asks: that of the harness its records were made under.
        """
        ...

    def program(self) -> ProgramSpec:
        """The trainer half of a weights recipe."""
        ...


# -- abilities -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Group:
    """`size` samples with this `key` make it complete. `member` tells them apart: a second report for one is refused.

    Size 0 is a sample that makes a batch of its own, at once and before all others.
    """

    key: str
    size: int
    member: str = ""


@runtime_checkable
class Grouping(Protocol):
    """A recipe whose batches take whole groups."""

    def group(self, sample: Sample) -> Group: ...


async def _nowhere(report: Report) -> bool:
    raise NotImplementedError(report.id)


@dataclass(frozen=True, slots=True)
class Tools:
    """What the deployment lends a recipe. `template` and `answering` are None where there is no local model."""

    template: ChatTemplate | None = None
    answering: Answering | None = None
    clock: Clock = field(default_factory=SystemClock)
    report: Callable[[Report], Awaitable[bool]] = _nowhere
    """Stores a derived report; False when its id was there already (the first one stands)."""


@runtime_checkable
class Assembling(Protocol):
    """A recipe that completes samples with what the rest of the batch or the template says. Pure; may take a second."""

    def assemble(self, samples: Sequence[Sample], tools: Tools) -> Sequence[Sample]: ...


@dataclass(frozen=True, slots=True)
class Seen:
    """One stored exchange as an observer gets it, with its place in the stream and in its session.

    `role` is `turn` for the agent's own turns, `retry` for a repeated request, and a name of side traffic otherwise.
    """

    sequence: int
    record: Inference
    session: str | None
    parent: int | None
    role: str | None


class Observer(Protocol):
    """Watches one scenario's exchanges in order. Calls never overlap and never hold up serving or training.

    What takes long (a judge) belongs in tasks of the observer's own, ended by `close`. After a restart exchanges from `pending`
    on are shown again, so reports need ids made of what they cite (`derived_id`).
    """

    async def observe(self, seen: Seen) -> None: ...

    async def tick(self, now: float) -> None:
        """Called about once a second, for time-outs."""
        ...

    def pending(self) -> int | None:
        """Sequence of the oldest exchange that may still lead to a report; None when there is none."""
        ...

    async def close(self) -> None: ...


@runtime_checkable
class Deriving(Protocol):
    """A recipe that makes reports from what it observes."""

    def observer(self, scenario: str, tools: Tools) -> Observer: ...


@runtime_checkable
class Combining(Protocol):
    """A recipe made of others, at most one per surface. Each reads the stream, trains and is released by itself."""

    def members(self) -> Sequence[Recipe]: ...


def members_of(recipe: Recipe | None) -> Sequence[Recipe]:
    """The recipes a deployment drives: those a composite is made of, else the one it has, if any."""
    if recipe is None:
        return ()
    return recipe.members() if isinstance(recipe, Combining) else (recipe,)


def derived_id(recipe: str, references: Sequence[str]) -> RecordId:
    """The id of the report a recipe derives about these receipts: the same every time, sorted beside the first of them."""
    digest = hashlib.sha256("/".join((recipe, *references)).encode()).hexdigest()
    stamp = references[0][:12] if references else ""
    return RecordId(stamp + digest[: 32 - len(stamp)])


def is_derived(recipe: str, report: Report) -> bool:
    """Whether a report is one the recipe made itself, rather than a client's."""
    return report.id == derived_id(recipe, report.references)
