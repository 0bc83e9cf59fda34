"""A Hugging Face causal language model run over flat rows of tokens, and its weights by checkpoint name.

Knows nothing of requests: callers hand in tokens, a plan and rows per adapter, and get logits of the rows they name. Every
method runs in the engine's one torch thread, except `read` of adapters.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reef_cli.core.errors import ConfigError, UnsupportedArtifact
from reef_cli.engines.embedded.adapters import Adapters, Rows
from reef_cli.engines.embedded.attention import NAME, Piece, Plan, SlotAttention, Slots, plan
from reef_cli.engines.embedded.linear import make_rowwise


class Model:
    """Weights, KV slots and adapters of one loaded model."""

    def __init__(self, path: str, dtype: torch.dtype, slots: int, context_length: int | None, max_lora_rank: int) -> None:
        from transformers import AttentionInterface, AutoModelForCausalLM

        AttentionInterface.register(NAME, self._attend)
        self.path = path
        self.net: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=NAME).eval()
        self.net.requires_grad_(False)
        make_rowwise(self.net)
        config = self.net.config.get_text_config()
        _check(config)
        longest = int(getattr(config, "max_position_embeddings", 4096))
        self.context_length = min(context_length or min(longest, 4096), longest)
        self.vocab_size = int(config.vocab_size)
        self.dtype = dtype
        heads = int(config.num_attention_heads)
        dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
        kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        self.slots = Slots(int(config.num_hidden_layers), slots, kv_heads, self.context_length, dim, dtype)
        self._attention = SlotAttention(self.slots)
        self.adapters = Adapters(self.net, dtype, max_lora_rank)

    def _attend(self, *args: Any, **options: Any) -> Any:
        return self._attention(*args, **options)

    @property
    def eos_ids(self) -> frozenset[int]:
        """End tokens of the generation configuration."""
        raw = self.net.generation_config.eos_token_id
        return frozenset(raw if isinstance(raw, list) else [] if raw is None else [raw])

    @torch.inference_mode()
    def forward(self, tokens: Sequence[int], where: Plan, rows: Sequence[Rows], keep: Sequence[int]) -> Tensor:
        """fp32 logits `[len(keep), vocab]` of the flat rows in `keep`; keys and values of all tokens land in their slots."""
        self._attention.plan = where
        self.adapters.rows = rows
        ids = [*tokens, *tokens] if len(tokens) == 1 else list(tokens)
        kept = torch.tensor([*keep, *keep] if len(keep) == 1 else keep or [0, 0])
        out = self.net(
            input_ids=torch.tensor([ids]), position_ids=where.positions.unsqueeze(0), use_cache=False, logits_to_keep=kept
        )
        logits: Tensor = out.logits[0, : len(keep)].float()
        return logits

    def parameters(self) -> dict[str, Tensor]:
        return dict(self.net.named_parameters()) | dict(self.net.named_buffers())

    @torch.inference_mode()
    def assign(self, named: Iterable[tuple[str, Tensor]]) -> int:
        """Copy tensors into the weights (cast to the engine's type); all are checked before the first is copied."""
        target = self.parameters()
        tied = bool(getattr(self.net.config.get_text_config(), "tie_word_embeddings", False))
        checked: list[tuple[Tensor, Tensor]] = []
        for name, tensor in named:
            if tied and name == "lm_head.weight":
                continue
            found = target.get(name)
            if found is None:
                raise UnsupportedArtifact(f"The model has no parameter {name!r}")
            if found.shape != tensor.shape:
                raise UnsupportedArtifact(f"{name!r} has shape {list(found.shape)}, got {list(tensor.shape)}")
            checked.append((found, tensor))
        for found, tensor in checked:
            found.copy_(tensor)
        return len(checked)

    def read_folder(self, path: Path) -> list[tuple[str, Tensor]]:
        """The tensors of a checkpoint folder, checked for completeness; touches no weights, so any thread may call it."""
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise UnsupportedArtifact(f"{path} holds no safetensors checkpoint")
        named = [pair for file in files for pair in _read(file)]
        missing = {name for name, _ in self.net.named_parameters()} - {name for name, _ in named} - {"lm_head.weight"}
        if missing:
            raise UnsupportedArtifact(f"{path} lacks {len(missing)} parameters, first {min(missing)!r}")
        return named

    def checksums(self) -> dict[str, str]:
        """16 hex digits per parameter, from its bytes."""
        return {
            name: hashlib.sha256(tensor.detach().contiguous().view(torch.uint8).numpy().data).hexdigest()[:16]
            for name, tensor in self.net.named_parameters()
        }

    def invariant(self) -> bool:
        """Whether this machine's kernels give the same bits alone and in company, in one chunk and in many."""
        if self.slots.count < 3:
            return False
        torch.manual_seed(0)
        length = min(100, self.context_length - 1)
        tokens = torch.randint(0, self.vocab_size, (length,)).tolist()
        alone = self.forward(tokens, plan([], [Piece(0, 0, length, 0)]), [], range(length))
        apart = torch.empty_like(alone)
        start = 0
        for size in (33, 1, 2, 3, 31, length):
            end = min(length, start + size)
            if end > start:
                apart[start:end] = self.forward(tokens[start:end], plan([], [Piece(1, start, end, 0)]), [], range(end - start))
            start = end
        # The last token once more, as a decoding step beside another prompt.
        self.forward(tokens[:3], plan([], [Piece(2, 0, 3, 0)]), [], [])
        mixed = plan([(1, length - 1)], [Piece(2, 3, length, 1)])
        together = self.forward([tokens[-1], *tokens[3:]], mixed, [], range(length - 2))
        return torch.equal(alone, apart) and torch.equal(alone[-1], together[0]) and torch.equal(alone[3:], together[1:])


def engine_checksum(checksums: Mapping[str, str]) -> str:
    """One digest over all parameters' checksums."""
    return hashlib.sha256(json.dumps(dict(sorted(checksums.items()))).encode()).hexdigest()[:16]


def _read(file: Path) -> list[tuple[str, Tensor]]:
    from safetensors.torch import load_file

    try:
        return list(load_file(str(file)).items())
    except Exception as error:  # safetensors raises its own untyped errors for any malformed file
        raise UnsupportedArtifact(f"{file} is no readable safetensors file", why=str(error)) from error


def _check(config: Any) -> None:
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise ConfigError(
            f"The embedded engine cannot run layers of type {', '.join(sorted(kinds))}",
            hint="choose a model with plain attention, or the sglang engine",
        )
