"""What a recipe is. A recipe folder holds only what differs between methods; this contract is everything it plugs into.

A recipe has two halves. This half runs in the server and must import in milliseconds: which reports make samples, when a
batch is ready, how steps reach users. The tensor half (`program`) is named by a dotted path and runs only in the trainer
subprocess (`reef_cli.trainer.program.Program`), or, for harness recipes, `proposer` names the code that proposes edits.

Settings are a frozen dataclass; its fields, defaults, types and docstring lines are the user documentation and are checked
against serve.yaml (unknown keys are errors with a suggestion).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from reef_cli.core.types import Cadence, Inference, Report, Sample, Surface


@dataclass(frozen=True, slots=True)
class Refusal:
    """A report or record that does not train, with a stable reason that is counted and listed."""

    reason: str


@dataclass(frozen=True, slots=True)
class ProgramSpec:
    """The trainer half: dotted path `module:Class` and its JSON-safe settings."""

    path: str
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RecipeSettings:
    """Settings every recipe has. Recipes extend this dataclass."""

    batch_size: int = 16
    """Samples per training step."""

    max_staleness: int = 4
    """Samples produced more than this many weight publications ago are dropped, alone, and counted."""

    gate_every: int = 8
    """Rolling cadence: full evaluation after this many published steps (and at the end)."""


class Recipe(Protocol):
    """One learning method, instantiated once per deployment with its checked settings."""

    name: ClassVar[str]
    title: ClassVar[str]
    surface: ClassVar[Surface]
    cadence: ClassVar[Cadence]
    settings_type: ClassVar[type[RecipeSettings]]
    settings: RecipeSettings

    def __init__(self, settings: Any) -> None: ...

    def admit(self, report: Report, records: Sequence[Inference], step_of: Mapping[str, int]) -> Sample | Refusal:
        """A sample from one report and the records it cites (in the report's order), or why there is none.

        `step_of` maps every weight version found in the records to its step in the scenario's chain. Pure and quick.
        """
        ...

    def program(self) -> ProgramSpec:
        """The trainer half of a weights recipe."""
        ...
