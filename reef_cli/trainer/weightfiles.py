"""Weights as an engine wants them, read lazily from files: whole checkpoints, or base weights with an adapter merged.

Names are Hugging Face checkpoint names. A tied `lm_head.weight` is skipped: the engine derives it from the embeddings.
Tensors are yielded one at a time, so memory stays at one tensor beside the bucket being filled.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from reef_cli.core.errors import UnsupportedArtifact
from reef_cli.weights.lora import CONFIG_FILE, merge, read_lora


def is_adapter(directory: Path) -> bool:
    """Whether the folder holds a LoRA adapter rather than a whole model."""
    return (directory / CONFIG_FILE).is_file()


def whole_weights(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a checkpoint folder."""
    tied = _tied(directory)
    for name, file in sorted(_index(directory).items()):
        if name != "lm_head.weight" or not tied:
            yield name, _read(file, name)


def merged_weights(base: Path, adapter: Path) -> Iterator[tuple[str, Tensor]]:
    """The base's tensors that the adapter touches, merged in fp32 from pristine base weights and cast back."""
    lora = read_lora(adapter)
    index = _index(base)
    for module, (a, b) in sorted(lora.tensors.items()):
        name = f"{module}.weight"
        if name not in index:
            raise UnsupportedArtifact(f"The adapter names {module!r}, which the base model does not have")
        yield name, merge(_read(index[name], name), a, b, lora.config.scaling(module))


def save_merged(base: Path, adapter: Path, target: Path) -> None:
    """The base with the adapter merged, as a whole checkpoint that an engine can read."""
    shutil.copytree(base, target, ignore=shutil.ignore_patterns("*.safetensors*"), dirs_exist_ok=True)
    whole = dict(whole_weights(base)) | dict(merged_weights(base, adapter))
    save_file(whole, str(target / "model.safetensors"), metadata={"format": "pt"})


def _index(directory: Path) -> dict[str, Path]:
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise UnsupportedArtifact(f"{directory} holds no safetensors weights")
    found: dict[str, Path] = {}
    for file in files:
        with safe_open(str(file), framework="pt") as handle:
            found |= dict.fromkeys(handle.keys(), file)
    return found


def _read(file: Path, name: str) -> Tensor:
    with safe_open(str(file), framework="pt") as handle:
        tensor: Tensor = handle.get_tensor(name)
    return tensor


def _tied(directory: Path) -> bool:
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnsupportedArtifact(f"{directory} has no readable config.json", why=str(error)) from error
    return bool(config.get("tie_word_embeddings", config.get("text_config", {}).get("tie_word_embeddings", False)))
