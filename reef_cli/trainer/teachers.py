"""Teachers: other weights, or other contexts, that score the policy's own answers.

`policy.score(micro, teacher)` asks one. Which context it reads is the micro-batch's business (`batching.in_context`), so a
frozen base with a hint in its prompt, or the policy itself after a solution, are combinations of the two. A teacher from
outside the trainer leaves its log-probs in the samples' extras (`Batch.token_extras`) and needs no object here.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from reef_cli.core.errors import TrainerError
from reef_cli.trainer.engine import Policy


class Teacher(ABC):
    """Weights to score with. Its state, if any, belongs into the program's `state_dict`."""

    @abstractmethod
    def at_work(self, policy: Policy) -> AbstractContextManager[bool]:
        """A context manager in which the policy's forward passes are the teacher's; its value says whether adapters are on."""

    def reset(self, policy: Policy) -> None:  # noqa: B027  a teacher without state has nothing to reset
        """Start from the weights the policy has now."""

    def follow(self, policy: Policy) -> None:  # noqa: B027  see reset
        """The policy has made a step."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027  see reset
        """Take back what `state_dict` gave."""


class Itself(Teacher):
    """The policy as it is; with another context it is a teacher."""

    def at_work(self, policy: Policy) -> AbstractContextManager[bool]:  # noqa: ARG002  there is nothing to put in place
        return nullcontext(True)


class FrozenBase(Teacher):
    """The base model: adapters off. Raises `TrainerError` when there are none to switch off."""

    @contextmanager
    def at_work(self, policy: Policy) -> Iterator[bool]:
        if not policy.actor.lora:
            raise TrainerError("No frozen base is in memory", why="trainer.method is full", hint="use trainer.method: lora")
        yield False


class MovingAverage(Teacher):
    """Exponential moving average of the trained weights: teacher = (1 - rate) * teacher + rate * policy, in fp32.

    A rate of 0 keeps the weights it started from.
    """

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._average: list[Tensor] = []

    def reset(self, policy: Policy) -> None:
        self._average = [parameter.detach().float().clone() for parameter in policy.trained]

    @torch.no_grad()
    def follow(self, policy: Policy) -> None:
        for mine, theirs in zip(self._average, policy.trained, strict=True):
            mine.lerp_(theirs.detach().float(), self.rate)

    @contextmanager
    def at_work(self, policy: Policy) -> Iterator[bool]:
        if policy.settings.zero_stage == 3:
            raise TrainerError("A moving average needs whole weights", hint="lower trainer.zero_stage below 3")
        kept = [parameter.detach().clone() for parameter in policy.trained]
        try:
            _put(policy, self._average)
            yield True
        finally:
            _put(policy, kept)

    def state_dict(self) -> dict[str, Any]:
        return {"average": [mine.cpu() for mine in self._average]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for mine, saved in zip(self._average, state["average"], strict=True):
            mine.copy_(saved)


def _put(policy: Policy, tensors: list[Tensor]) -> None:
    for parameter, tensor in zip(policy.trained, tensors, strict=True):
        parameter.data.copy_(tensor)


def named(kind: str, rate: float = 0.0) -> Teacher:
    """`base`, `self` or `average` (with its rate)."""
    if kind == "average":
        return MovingAverage(rate)
    kinds: dict[str, type[Teacher]] = {"base": FrozenBase, "self": Itself}
    if kind not in kinds:
        raise TrainerError(f"There is no teacher {kind!r}", hint="base, self, average")
    return kinds[kind]()
