"""Weights as an engine wants them, read lazily from files: whole checkpoints, or base weights with an adapter merged.

Names are Hugging Face checkpoint names. A tied `lm_head.weight` is skipped: the engine derives it from the embeddings.
Tensors are read one at a time, so memory stays at one tensor beside the bucket being filled.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from reef_cli.core.errors import UnsupportedArtifact
from reef_cli.weights.lora import CONFIG_FILE, Lora, merge, read_lora

HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights that an artifact's folder stands for, by name; an adapter's are merged in fp32 over pristine base weights."""

    directory: Path
    index: Mapping[str, Path]
    lora: Lora | None = None
    _open: dict[Path, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, base: Path, directory: Path | None) -> "Weights":
        """Those of an adapter or checkpoint folder, or of the base model (None). Raises `UnsupportedArtifact`."""
        if directory is None or not is_adapter(directory):
            return cls(directory or base, _index(directory or base))
        index, lora = _index(base), read_lora(directory)
        if odd := next((module for module in sorted(lora.tensors) if f"{module}.weight" not in index), None):
            raise UnsupportedArtifact(f"The adapter names {odd!r}, which the base model does not have")
        return cls(base, index, lora)

    @property
    def names(self) -> list[str]:
        """In a fixed order."""
        tied = _tied(self.directory)
        return [name for name in sorted(self.index) if name != HEAD or not tied]

    @property
    def merged(self) -> set[str]:
        """Names that the adapter changes."""
        return set() if self.lora is None else {f"{module}.weight" for module in self.lora.tensors}

    def __getitem__(self, name: str) -> Tensor:
        module = name.removesuffix(".weight")
        tensor = self._read(name)
        if self.lora is None or module not in self.lora.tensors:
            return tensor
        return merge(tensor, *self.lora.tensors[module], self.lora.config.scaling(module))

    def beyond(self, held: "Weights | None") -> list[str]:
        """Names to send to who holds `held` (None: nobody knows what): all but those that must be equal by their origin."""
        if held is None or held.directory != self.directory:
            return self.names
        return sorted(self.merged | held.merged)

    def _read(self, name: str) -> Tensor:
        file = self.index[name]
        if file not in self._open:
            self._open[file] = safe_open(str(file), framework="pt")
        tensor: Tensor = self._open[file].get_tensor(name)
        return tensor


def is_adapter(directory: Path) -> bool:
    """Whether the folder holds a LoRA adapter rather than a whole model."""
    return (directory / CONFIG_FILE).is_file()


def whole_weights(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a checkpoint folder."""
    weights = Weights.of(directory, None)
    return ((name, weights[name]) for name in weights.names)


def merged_weights(base: Path, adapter: Path) -> Iterator[tuple[str, Tensor]]:
    """The base's tensors that the adapter touches, merged in fp32 from pristine base weights and cast back."""
    weights = Weights.of(base, adapter)
    return ((name, weights[name]) for name in sorted(weights.merged))


def save_merged(base: Path, adapter: Path, target: Path) -> None:
    """The base with the adapter merged, as a whole checkpoint that an engine can read."""
    shutil.copytree(base, target, ignore=shutil.ignore_patterns("*.safetensors*"), dirs_exist_ok=True)
    weights = Weights.of(base, adapter)
    save_file({name: weights[name] for name in weights.names}, str(target / "model.safetensors"), metadata={"format": "pt"})


def _index(directory: Path) -> dict[str, Path]:
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise UnsupportedArtifact(f"{directory} holds no safetensors weights")
    found: dict[str, Path] = {}
    for file in files:
        with safe_open(str(file), framework="pt") as handle:
            found |= dict.fromkeys(handle.keys(), file)
    return found


def _tied(directory: Path) -> bool:
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnsupportedArtifact(f"{directory} has no readable config.json", why=str(error)) from error
    return bool(config.get("tie_word_embeddings", config.get("text_config", {}).get("tie_word_embeddings", False)))
