"""Teachers: other weights, or other contexts, that score the policy's own answers.

`policy.score(micro, teacher)` asks one. Which context it reads is the micro-batch's business (`batching.in_context`), so a
frozen base with a hint in its prompt, or the policy itself after a solution, are combinations of the two. A teacher from
outside the trainer leaves its log-probs in the samples' extras (`Batch.token_extras`) and needs no object here.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from reef_cli.core.errors import TrainerError
from reef_cli.trainer.batching import MicroBatch
from reef_cli.trainer.engine import Policy
from reef_cli.trainer.model import Actor, TokenOutput, load_actor


class Teacher(ABC):
    """Weights to score with. Its state, if any, belongs into the program's `state_dict`."""

    @abstractmethod
    def answer(self, policy: Policy, micro: MicroBatch, ids: Tensor | None = None) -> TokenOutput:
        """What the teacher says at the action tokens; called without gradients."""

    def head(self, policy: Policy) -> nn.Module:
        """What maps the hidden states of `answer` to logits."""
        return policy.head

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

    def answer(self, policy: Policy, micro: MicroBatch, ids: Tensor | None = None) -> TokenOutput:
        return policy.forward(micro, ids)


class FrozenBase(Teacher):
    """The base model: adapters off. Raises `TrainerError` when there are none to switch off."""

    def answer(self, policy: Policy, micro: MicroBatch, ids: Tensor | None = None) -> TokenOutput:
        if not policy.actor.lora:
            raise TrainerError("No frozen base is in memory", why="trainer.method is full", hint="use trainer.method: lora")
        return policy.forward(micro, ids, adapter=False)


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

    def answer(self, policy: Policy, micro: MicroBatch, ids: Tensor | None = None) -> TokenOutput:
        if policy.settings.zero_stage == 3:
            raise TrainerError("A moving average needs whole weights", hint="lower trainer.zero_stage below 3")
        kept = [parameter.detach().clone() for parameter in policy.trained]
        try:
            _put(policy, self._average)
            return policy.forward(micro, ids)
        finally:
            _put(policy, kept)

    def state_dict(self) -> dict[str, Any]:
        return {"average": [mine.cpu() for mine in self._average]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for mine, saved in zip(self._average, state["average"], strict=True):
            mine.copy_(saved)


class OtherModel(Teacher):
    """Another frozen model with the policy's vocabulary, from a folder; loaded when first asked."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._actor: Actor | None = None

    def answer(self, policy: Policy, micro: MicroBatch, ids: Tensor | None = None) -> TokenOutput:
        wanted = micro.targets.unsqueeze(-1) if ids is None else ids
        actor = self._loaded(policy)
        out = actor(*micro.place, wanted, micro.temperature)
        return TokenOutput(*out)

    def head(self, policy: Policy) -> nn.Module:
        found: nn.Module = self._loaded(policy).causal.get_output_embeddings()
        return found

    def _loaded(self, policy: Policy) -> Actor:
        if self._actor is None:
            if not (self.directory / "config.json").is_file():
                raise TrainerError(f"The teacher {self.directory} is no model folder", hint="give a Hugging Face model folder")
            actor = load_actor(self.directory, replace(policy.settings, method="full"), policy.device)
            mine, theirs = (a.causal.config.get_text_config().vocab_size for a in (policy.actor, actor))
            if mine != theirs:
                raise TrainerError(
                    f"The teacher has {theirs} tokens, the policy {mine}",
                    why="they must share a tokenizer",
                    hint="let a teacher of another family answer instead, and learn from its answers (continual: answers)",
                )
            self._actor = actor.requires_grad_(False).eval()
        return self._actor


def _put(policy: Policy, tensors: list[Tensor]) -> None:
    for parameter, tensor in zip(policy.trained, tensors, strict=True):
        parameter.data.copy_(tensor)


def named(kind: str, rate: float = 0.0) -> Teacher:
    """`base`, `self`, `average` (with its rate), or the folder of another model."""
    if kind == "average":
        return MovingAverage(rate)
    kinds: dict[str, type[Teacher]] = {"base": FrozenBase, "self": Itself}
    return kinds[kind]() if kind in kinds else OtherModel(Path(kind))
