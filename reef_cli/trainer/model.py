"""The language model inside the trainer: loading, LoRA modules, and the forward pass that yields log-probs.

Promises: adapters are applied as engines apply them (y = base(x) + scaling * B(A x), in the model's precision), and
log-probs are those of the sampling temperature. Knows no optimizer and no process group; ZeRO-3's gathering works through
module calls.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from reef_cli.config.schema import TrainerSettings
from reef_cli.core.errors import TrainerError, UnsupportedArtifact
from reef_cli.trainer.losses.logprobs import linear_logprobs, selected_logprobs
from reef_cli.weights.lora import Lora, LoraConfig

PRECISIONS = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """Per action token: log-probs `[N, K]` of the asked ids, entropy `[N]` (no gradient), hidden state `[N, H]`."""

    logprobs: Tensor
    entropy: Tensor
    hidden: Tensor

    @property
    def logprob(self) -> Tensor:
        """`[N]`: the first asked id, which is the sampled token unless the caller asked for others."""
        return self.logprobs[:, 0]


class Actor(nn.Module):
    """A causal language model that answers with log-probs at chosen positions instead of logits everywhere."""

    def __init__(self, model: nn.Module, lora: bool) -> None:
        super().__init__()
        self.model = model
        self.lora = lora
        causal = self.causal
        self.hidden_size: int = causal.config.get_text_config().hidden_size
        self.split_head = _head_is_plain(causal)
        self.partitioned_head = False
        """Set under ZeRO stage 3, where the head's weight is spread over the ranks."""

    @property
    def causal(self) -> Any:
        """The transformers model under the LoRA wrapper."""
        return self.model.get_base_model() if self.lora else self.model  # type: ignore[operator]

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        line: Tensor,
        column: Tensor,
        positions: Tensor | None,
        ids: Tensor | None,
        temperature: Tensor | None,
        adapter: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs `[N, K]`, entropy `[N]` and hidden states `[N, H]` at `(line, column)`; without `ids` hidden states only.

        `positions` `[1, T]` tell that samples are packed behind each other; the mask is all ones then.
        """
        with self._adapter(adapter):
            states, logits = self._body(input_ids, attention_mask, positions)
            hidden = states[line, column]
            if ids is None or temperature is None:
                return hidden.new_zeros(0), hidden.new_zeros(0), hidden
            if logits is not None:
                logprobs, entropy = selected_logprobs(logits[line, column], ids, temperature)
            elif self.partitioned_head:
                logprobs, entropy = self._through_gathered_head(states, hidden, ids, temperature)
            else:
                logprobs, entropy = linear_logprobs(hidden, self.causal.get_output_embeddings(), ids, temperature)
        return logprobs, entropy, hidden

    def _through_gathered_head(self, states: Tensor, hidden: Tensor, ids: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
        """ZeRO-3 gathers the head once per module call: every rank calls it exactly once, also one without action tokens."""
        head = self.causal.get_output_embeddings()
        if len(hidden) == 0:
            nothing = 0 * head(states[0, :1]).float().sum()
            return torch.zeros(ids.shape, device=hidden.device) + nothing, torch.zeros(0, device=hidden.device)
        return selected_logprobs(head(hidden), ids, temperature)

    def _body(self, input_ids: Tensor, attention_mask: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor | None]:
        # Without a mask transformers finds packed sequences by their positions and keeps attention within them.
        mask = attention_mask if positions is None else None
        read = {"input_ids": input_ids, "attention_mask": mask, "position_ids": positions, "use_cache": False}
        if self.split_head:
            return self.causal.base_model(**read).last_hidden_state, None
        out = self.causal(**read, output_hidden_states=True)
        return out.hidden_states[-1], out.logits

    def _adapter(self, on: bool) -> Any:
        return nullcontext() if on or not self.lora else self.model.disable_adapter()  # type: ignore[operator]


def load_actor(directory: Path, settings: TrainerSettings, device: torch.device) -> Actor:
    """The model of `directory` in the settings' precision; with method `lora` frozen under fresh LoRA modules."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=PRECISIONS[settings.precision], local_files_only=True, low_cpu_mem_usage=True
    )
    model.config.use_cache = False
    if settings.method == "full":
        return _finished(Actor(model.to(device), lora=False), settings)
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model

    config = PeftConfig(
        r=settings.rank, lora_alpha=settings.alpha, target_modules=list(settings.target_modules), task_type="CAUSAL_LM"
    )
    # Adapter weights stay in the model's precision, as in the engine; the optimizer keeps fp32 masters of them.
    return _finished(Actor(get_peft_model(model, config, autocast_adapter_dtype=False).to(device), lora=True), settings)


def _finished(actor: Actor, settings: TrainerSettings) -> Actor:
    if settings.gradient_checkpointing:
        # ZeRO-3's partitions have other shapes in the backward pass, which only the reentrant form does not mind.
        actor.causal.gradient_checkpointing_enable({"use_reentrant": settings.zero_stage == 3})
        actor.causal.enable_input_require_grads()
    if settings.pack_tokens is not None and not _keeps_apart(actor):
        raise TrainerError(
            f"Samples cannot be packed for a {type(actor.causal).__name__}",
            why="behind each other they see each other",
            hint="leave trainer.pack_tokens out",
        )
    return actor


def reset_lora(actor: Actor, lora: Lora | None, seed: int) -> None:
    """Put an adapter's matrices into the modules, or the usual start (A random, B zero), the same for the same seed."""
    pairs = dict(lora_parameters(actor))
    if lora is not None and set(lora.tensors) != set(pairs):
        odd = sorted(set(lora.tensors) ^ set(pairs))[0]
        raise UnsupportedArtifact(
            f"The base adapter and the trainer differ in module {odd!r}", hint="set trainer.target_modules as in the adapter"
        )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in sorted(pairs):
            a, b = pairs[module]
            if lora is None:
                bound = 1 / a.shape[1] ** 0.5
                a.copy_((torch.rand(a.shape, generator=generator) * 2 - 1) * bound)
                b.zero_()
                continue
            new_a, new_b = lora.tensors[module]
            if new_a.shape != a.shape or new_b.shape != b.shape:
                raise UnsupportedArtifact(
                    f"The base adapter has rank {new_a.shape[0]}, the trainer {a.shape[0]}",
                    hint="set trainer.rank as in the adapter",
                )
            a.copy_(new_a)
            b.copy_(new_b)


def lora_parameters(actor: Actor) -> Iterator[tuple[str, tuple[nn.Parameter, nn.Parameter]]]:
    """`(module, (A, B))` under Hugging Face module names, in the model's order."""
    for name, module in actor.causal.named_modules():
        if hasattr(module, "lora_A") and "default" in module.lora_A:
            yield name, (module.lora_A["default"].weight, module.lora_B["default"].weight)


def lora_config(settings: TrainerSettings, base: str) -> LoraConfig:
    """The adapter file's configuration."""
    return LoraConfig(settings.rank, settings.alpha, tuple(settings.target_modules), base)


@contextmanager
def gathered(parameters: list[nn.Parameter], stage: int) -> Iterator[None]:
    """Whole tensors on every rank inside the block; a no-op below ZeRO stage 3. Every rank must enter."""
    if stage < 3:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(parameters, modifier_rank=None):
        yield


@torch.no_grad()
def _keeps_apart(actor: Actor) -> bool:
    """Whether two sequences packed into one row give the same hidden states as alone, but for rounding."""
    device = actor.causal.device
    one, two = torch.arange(3, 9, device=device), torch.arange(11, 4, -1, device=device)
    packed, other = torch.cat([one, two])[None], torch.cat([one.flip(0), two])[None]
    positions = torch.cat([torch.arange(len(part), device=device) for part in (one, two)])[None]
    nothing = torch.ones_like(packed)
    (states, _), (beside, _) = (actor._body(ids, nothing, positions) for ids in (packed, other))
    # The second sequence must not notice that another one stands before it.
    return torch.equal(states[0, len(one) :], beside[0, len(one) :])


def _head_is_plain(causal: Any) -> bool:
    """Whether logits are exactly head(last hidden state): models that scale or cap logits take the slower whole path."""
    ids = torch.arange(4, device=causal.device)[None]
    with torch.no_grad():
        try:
            whole = causal(input_ids=ids, use_cache=False).logits
            parts = causal.get_output_embeddings()(causal.base_model(input_ids=ids, use_cache=False).last_hidden_state)
        except (AttributeError, TypeError):
            return False
    return whole.shape == parts.shape and bool(torch.equal(whole, parts))
