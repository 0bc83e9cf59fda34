"""What a training step will need of memory and disk, from a model folder's own headers; nothing is loaded.

Weights, gradients and optimizer states are exact: counted from the tensor shapes and shared out by the ZeRO stage
(arXiv:1910.02054, section 3). Activations and the process itself are a rule of thumb, kept apart. Imports no torch.
"""

import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reef_cli.config.schema import TrainerSettings
from reef_cli.core.errors import UnsupportedArtifact

PROCESS = 700 * 1024**2
"""Python, torch and DeepSpeed before a model is loaded, per rank; seen: 0.6 to 0.7 GB."""

_BYTES = {"bf16": 2, "fp32": 4}
_STATES = 8  # AdamW's two moments, fp32
_MASTER = 4  # fp32 copy of what trains
_HEAD_TOKENS = 256  # whose logits are alive at once (`losses.logprobs`)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes per rank, and on disk. `weights`, `gradients` and `optimizer` are exact, `activations` and `process` are not."""

    parameters: int
    trained: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    process: int
    checkpoint: int
    artifact: int

    @property
    def fixed(self) -> int:
        """What a step cannot do without, however small its batch."""
        return self.weights + self.gradients + self.optimizer

    @property
    def memory(self) -> int:
        return self.fixed + self.activations + self.process


def estimate(settings: TrainerSettings, model_dir: Path, *, tokens: int) -> Estimate:
    """For micro-batches whose rows are `tokens` long. Raises `UnsupportedArtifact` when the folder has no safetensors."""
    shapes = dict(tensor_shapes(model_dir))
    if not shapes:
        raise UnsupportedArtifact(f"{model_dir} has no safetensors files", hint="convert the model to safetensors")
    total = sum(map(math.prod, shapes.values()))
    trained = total if settings.method == "full" else _adapter_parameters(shapes, settings)
    width, stage, ranks = _BYTES[settings.precision], settings.zero_stage, settings.world_size
    # LoRA freezes the model: ZeRO-3 still spreads it, gradients and states exist for the adapter only.
    held = total if settings.method == "full" else total + trained
    return Estimate(
        parameters=total,
        trained=trained,
        weights=_share(held * width, ranks, stage >= 3),
        gradients=_share(trained * width, ranks, stage >= 2),
        optimizer=_share(trained * (_STATES + _MASTER), ranks, stage >= 1),
        activations=_activations(settings, _text_config(model_dir), tokens, width),
        process=PROCESS,
        checkpoint=trained * (_STATES + _MASTER + width),
        artifact=trained * width,
    )


def tensor_shapes(model_dir: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor in the folder's safetensors files, read from their headers."""
    for path in sorted(model_dir.glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        for name, entry in header.items():
            if name != "__metadata__":
                yield name, tuple(entry["shape"])


def _adapter_parameters(shapes: Mapping[str, tuple[int, ...]], settings: TrainerSettings) -> int:
    """Rank times (inputs + outputs) of each targeted linear layer."""
    endings = tuple(f".{name}.weight" for name in settings.target_modules)
    return sum(settings.rank * sum(shape) for name, shape in shapes.items() if name.endswith(endings) and len(shape) == 2)


def _activations(settings: TrainerSettings, config: Mapping[str, Any], tokens: int, width: int) -> int:
    """What the backward pass keeps: per token and layer the inputs of each matrix product and norm; and one chunk of logits."""
    layers = int(config.get("num_hidden_layers", 12))
    hidden = int(config.get("hidden_size", 768))
    inner = int(config.get("intermediate_size", 4 * hidden))
    per_token = layers * (10 * hidden + 4 * inner) * width
    head = _HEAD_TOKENS * int(config.get("vocab_size", 32_000)) * 4 * 2  # logits and their gradient, fp32
    shown = settings.micro_batch * tokens if settings.pack_tokens is None else max(settings.pack_tokens, tokens)
    return shown * per_token + head


def _text_config(model_dir: Path) -> Mapping[str, Any]:
    try:
        config: dict[str, Any] = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnsupportedArtifact(f"{model_dir}/config.json cannot be read", why=str(error)) from error
    text: Mapping[str, Any] = config.get("text_config") or config
    return text


def _share(size: int, ranks: int, spread: bool) -> int:
    return math.ceil(size / ranks) if spread else size
