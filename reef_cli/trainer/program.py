"""What a method's tensor half is: a `Program` gets the policy and a batch, and makes one training step of it.

The worker owns everything around it: loading, swapping scenarios, checkpoints, export. A program owns its loss and whatever
else must live with the weights (a critic and its optimizer, counters); it hands that over as a `state_dict` and takes it
back.
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from reef_cli.core.errors import RecipeNotFound, TrainerError

if TYPE_CHECKING:
    from reef_cli.trainer.batching import Batch
    from reef_cli.trainer.engine import Policy

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """AdamW of the policy. `clip` bounds the gradient's global norm."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip: float = 1.0


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step did: whether the policy's weights changed, and its metrics (JSON-safe, finite numbers)."""

    policy_updated: bool
    metrics: Mapping[str, Any] = field(default_factory=dict)


class StepRefused(TrainerError):
    """The step met numbers it must not learn from (non-finite loss or gradient); nothing was written."""


class Program(ABC):
    """One method in the trainer. Built once per process; its state is swapped with the scenario's weights."""

    settings_type: ClassVar[type[Any]]

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings: Any = read_settings(self.settings_type, settings)

    @property
    def optimizer(self) -> OptimizerSettings:
        """The policy's optimizer; its learning rate is the setting `policy_lr`, unless a program says otherwise."""
        return OptimizerSettings(lr=self.settings.policy_lr)

    def reset(self, policy: "Policy") -> None:  # noqa: B027  a program without state has nothing to reset
        """Forget everything: the next step is the first of a fresh state. Must be deterministic in `policy.seed`."""

    @abstractmethod
    def train(self, policy: "Policy", batch: "Batch") -> StepReport:
        """One step. May raise `StepRefused`; then the worker drops the memory's state and the old checkpoint stands."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers and containers that belong to the weights after the last step."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027  see reset
        """Take back what `state_dict` gave."""


def read_settings(kind: type[T], raw: Mapping[str, Any]) -> T:
    """A settings dataclass from JSON data; unknown keys are errors."""
    if not is_dataclass(kind):
        raise TrainerError(f"{kind.__name__} is no dataclass and cannot hold a program's settings")
    unknown = set(raw) - {field.name for field in fields(kind)}
    if unknown:
        raise TrainerError(f"Unknown settings for {kind.__name__}: {', '.join(sorted(unknown))}")
    return kind(**raw)


def load_program(path: str, settings: Mapping[str, Any]) -> Program:
    """Import `module:Class` and build it. Raises `RecipeNotFound`."""
    module, _, name = path.partition(":")
    try:
        cls = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise RecipeNotFound(f"Program {path!r} cannot be imported", why=str(error)) from error
    if not (isinstance(cls, type) and issubclass(cls, Program)):
        raise RecipeNotFound(f"{path!r} is no subclass of reef_cli.trainer.program.Program")
    return cls(settings)
