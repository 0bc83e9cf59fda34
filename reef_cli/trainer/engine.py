"""The policy under training: a DeepSpeed engine around the actor, with one gradient step per call of `update`.

Promises: gradients are the mean over all action tokens of the batch on all ranks, however it is cut into micro-batches; a
step that is discarded or refused leaves no trace in what `save` would write after the caller restores the state. No JIT
compilation: the optimizer is torch's AdamW and DeepSpeed's shared-memory op is off. Knows no files but DeepSpeed's own
checkpoint folder.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from reef_cli.config.schema import TrainerSettings
from reef_cli.core.errors import TrainerError
from reef_cli.trainer.batching import MicroBatch
from reef_cli.trainer.losses import distill
from reef_cli.trainer.model import Actor, TokenOutput
from reef_cli.trainer.program import OptimizerSettings, StepRefused

if TYPE_CHECKING:
    from reef_cli.trainer.teachers import Teacher

TAG = "engine"
Loss = Callable[[MicroBatch, TokenOutput], Tensor]
"""Loss of a micro-batch, summed over its action tokens."""


def deepspeed_config(settings: TrainerSettings, optimizer: OptimizerSettings) -> dict[str, Any]:
    """Reef's DeepSpeed configuration with the user's `trainer.deepspeed` merged over it."""
    ours: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": settings.micro_batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": optimizer.clip,
        "zero_optimization": {"stage": settings.zero_stage},
        "bf16": {"enabled": settings.precision == "bf16", "check_grad_overflow": True},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1_000_000_000,
    }
    return _merged(ours, settings.deepspeed)


def _merged(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(ours)
    for key, value in theirs.items():
        mine = out.get(key)
        out[key] = _merged(mine, value) if isinstance(mine, Mapping) and isinstance(value, Mapping) else value
    return out


@dataclass(frozen=True, slots=True)
class Update:
    """Whether a step was applied, the mean loss per token, the gradient norm before clipping, or why it was called off."""

    applied: bool
    loss: float
    grad_norm: float | None
    reason: str | None


class Policy:
    """What a program trains. One per process; its weights belong to whichever state was put in last."""

    def __init__(self, actor: Actor, settings: TrainerSettings, optimizer: OptimizerSettings, seed: int) -> None:
        self.actor = actor
        self.seed = seed
        self.settings = settings
        self.device = next(actor.parameters()).device
        actor.partitioned_head = settings.zero_stage == 3
        self.dirty = False
        """Whether gradients of a step called off are still there; `load` or `start` clears them."""
        self.tick: Callable[[str, int, int], None] = lambda _phase, _done, _total: None
        self._optimizer = optimizer
        self._engine: Any = None
        self.start()

    @property
    def hidden_size(self) -> int:
        return self.actor.hidden_size

    @property
    def world_size(self) -> int:
        return dist.get_world_size()

    @property
    def rank(self) -> int:
        return dist.get_rank()

    def start(self) -> None:
        """A fresh optimizer over the weights the actor holds now."""
        import deepspeed

        self.close()
        self.dirty = False
        trained = [parameter for parameter in self.actor.parameters() if parameter.requires_grad]
        spec = self._optimizer
        adam = torch.optim.AdamW(trained, lr=spec.lr, betas=spec.betas, weight_decay=spec.weight_decay, foreach=True)
        self._engine, *_ = deepspeed.initialize(
            model=self.actor, model_parameters=trained, optimizer=adam, config=deepspeed_config(self.settings, spec)
        )

    def close(self) -> None:
        """Let go of the DeepSpeed engine and its hooks."""
        if self._engine is not None:
            self._engine.destroy()
            self._engine = None

    def save(self, directory: Path) -> None:
        """DeepSpeed's checkpoint of trained weights and optimizer; every rank calls it."""
        self._engine.save_checkpoint(str(directory), tag=TAG, exclude_frozen_parameters=True)

    def load(self, directory: Path) -> None:
        """Take back what `save` wrote, but with today's learning rate; every rank calls it."""
        self._engine.load_checkpoint(str(directory), tag=TAG, load_module_strict=False)
        for group in self._engine.optimizer.param_groups:
            group["lr"] = self._optimizer.lr
        self._discard_gradients()

    def _discard_gradients(self) -> None:
        """Forget what backward passes accumulated, here and in ZeRO's partitions."""
        self._engine.zero_grad()
        optimizer = self._engine.optimizer
        optimizer.zero_grad(set_to_none=True)
        for name in ("averaged_gradients", "all_grad_tensors"):
            held = getattr(optimizer, name, None)
            if isinstance(held, dict):
                held.update(dict.fromkeys(held))
        self.dirty = False

    def forward(self, micro: MicroBatch, ids: Tensor | None = None, adapter: bool = True) -> TokenOutput:
        """Log-probs of `ids` `[N, K]` (default: the sampled tokens) at the sampling temperature, with gradient if enabled."""
        wanted = micro.targets.unsqueeze(-1) if ids is None else ids
        out = self._engine(*micro.place, wanted, micro.temperature, adapter=adapter)
        return TokenOutput(*out)

    @torch.no_grad()
    def features(self, micro: MicroBatch) -> Tensor:
        """Hidden states `[N, H]` (fp32, detached) of the frozen base at the positions that predict the action tokens.

        With method `full` there is no frozen base in memory; then they are the policy's own.
        """
        out = self._engine(*micro.place, None, None, adapter=False)
        hidden: Tensor = out[2].float()
        return hidden

    @property
    def head(self) -> nn.Module:
        """What maps hidden states to logits. Raises `TrainerError` where logits are more than that."""
        if not self.actor.split_head or self.actor.partitioned_head:
            raise TrainerError(
                "Distributions over the whole vocabulary need a plain output head",
                why="this model scales its logits, or ZeRO stage 3 spreads the head over the ranks",
                hint="distil sampled tokens only, or lower trainer.zero_stage",
            )
        head: nn.Module = self.actor.causal.get_output_embeddings()
        return head

    @property
    def trained(self) -> list[nn.Parameter]:
        """The parameters under training, in a fixed order."""
        return [parameter for parameter in self.actor.parameters() if parameter.requires_grad]

    @torch.no_grad()
    def score(self, micro: MicroBatch, teacher: "Teacher | None" = None, ids: Tensor | None = None) -> TokenOutput:
        """What `teacher` (None: the policy itself) says at the action tokens, without gradient: log-probs of `ids` `[N, K]`
        (default: the tokens of the answer) and hidden states. For another context give `batching.in_context(...)`.
        """
        return self.forward(micro, ids) if teacher is None else teacher.answer(self, micro, ids)

    @torch.no_grad()
    def top(self, micro: MicroBatch, k: int, teacher: "Teacher | None" = None) -> tuple[Tensor, Tensor]:
        """The `k` likeliest ids `[N, k]` at the action tokens and their log-probs."""
        head = self.head if teacher is None else teacher.head(self)
        return distill.top_entries(self.score(micro, teacher).hidden, head, micro.temperature, k)

    def update(
        self,
        micros: Sequence[MicroBatch],
        tokens: float,
        loss: Loss,
        veto: Callable[[], str | None],
        ids: Callable[[MicroBatch], Tensor] | None = None,
    ) -> Update:
        """One optimizer step on sum(loss) / tokens. `veto`, called after the backward pass, may call the step off.

        `ids` gives the ids `[N, K]` whose log-probs the loss sees (default: the sampled token alone).
        A step called off leaves gradients behind: the caller must `load` or `start` before the next one.
        Raises `StepRefused` on a non-finite loss or gradient.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for index, micro in enumerate(micros):
            self.tick("policy", index, len(micros))
            self._engine.set_gradient_accumulation_boundary(index == len(micros) - 1)
            value = loss(micro, self.forward(micro, None if ids is None else ids(micro)))
            total += value.detach().double()
            # DeepSpeed averages over ranks; the loss is a mean over the tokens of all of them.
            self._engine.backward(value * (self.world_size / max(1, tokens)))
        mean = float(self.sum(total)) / max(1, tokens)
        if not math.isfinite(mean):
            raise StepRefused(
                f"The policy loss is {mean}", hint="look at the batch's log-probs and rewards; lower the learning rate"
            )
        reason = veto()
        if reason is not None:
            self.dirty = True
            return Update(False, mean, None, reason)
        self._engine.step()
        norm = self._engine.get_global_grad_norm()
        norm = None if norm is None else float(norm)
        if not self._engine.was_step_applied() or (norm is not None and not math.isfinite(norm)):
            raise StepRefused(f"The policy's gradient norm is {norm}", hint="lower the learning rate; try precision fp32")
        return Update(True, mean, norm, None)

    def sum(self, value: Tensor) -> Tensor:
        """`value` added up over the ranks."""
        if self.world_size > 1:
            dist.all_reduce(value)
        return value

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Add up gradients over the ranks, for a program's own modules (identical on every rank)."""
        if self.world_size > 1:
            for parameter in parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad)

    def gather(self, value: Any) -> list[Any]:
        """Small picklable values of every rank, in rank order."""
        if self.world_size == 1:
            return [value]
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, value)
        return found

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()
