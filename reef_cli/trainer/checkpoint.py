"""The trainer's files: the candidate (what engines load) and the checkpoint (what the next step resumes from).

Promises: both appear under their final names only when complete and synced to disk, so a crash leaves either the old files
or the new ones. A checkpoint carries an id by which memory is recognised as equal to it, wherever the folder is moved.
Layout under `out`:

    adapter/ or model/    the candidate in Hugging Face's layout
    checkpoint/           state.json, program.pt, engine/ (DeepSpeed: trained weights, optimizer)
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from reef_cli.core.errors import StorageError, TrainerError

STATE_FILE = "state.json"
PROGRAM_FILE = "program.pt"
ENGINE_DIR = "engine"
SHARD_BYTES = 4 * 1024**3
_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".safetensors.index.json", ".bin.index.json")


@dataclass(frozen=True, slots=True)
class Shape:
    """What must agree for a checkpoint to be resumable; anything else starts afresh from the artifact's weights."""

    method: str
    rank: int
    alpha: float
    precision: str
    zero_stage: int
    world_size: int
    program: str
    target_modules: tuple[str, ...]

    def differs(self, other: Mapping[str, Any]) -> str | None:
        """The first field that differs, in words, or None."""
        for name, mine in asdict(self).items():
            theirs = other.get(name)
            if (list(mine) if isinstance(mine, tuple) else mine) != theirs:
                return f"{name} was {theirs!r}, is {mine!r}"
        return None


@dataclass(frozen=True, slots=True)
class State:
    """The contents of `state.json`."""

    id: str
    scenario: str
    shape: Mapping[str, Any]


def read_state(checkpoint: Path) -> State:
    """Raises `TrainerError` when the folder is no checkpoint."""
    try:
        raw = json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))
        return State(raw["id"], raw["scenario"], raw["shape"])
    except (OSError, ValueError, KeyError) as error:
        raise TrainerError(f"{checkpoint} is no trainer checkpoint", why=str(error)) from error


def write_state(checkpoint: Path, state_id: str, scenario: str, shape: Shape, program: Mapping[str, Any]) -> None:
    """Rank 0's part of a checkpoint."""
    torch.save(dict(program), checkpoint / PROGRAM_FILE)
    text = json.dumps({"id": state_id, "scenario": scenario, "shape": asdict(shape)}, indent=1)
    (checkpoint / STATE_FILE).write_text(text, encoding="utf-8")


def read_program(checkpoint: Path) -> dict[str, Any]:
    """The program's state; tensors and plain containers only, never arbitrary pickles."""
    state: dict[str, Any] = torch.load(checkpoint / PROGRAM_FILE, map_location="cpu", weights_only=True)
    return state


def write_model(directory: Path, tensors: Mapping[str, Tensor], base: Path) -> None:
    """A full Hugging Face folder: the base's configuration and tokenizer files, and `tensors` in safetensors shards."""
    directory.mkdir(parents=True, exist_ok=True)
    for file in sorted(base.iterdir()):
        if file.is_file() and not file.name.endswith(_WEIGHTS):
            shutil.copyfile(file, directory / file.name)
    shards = _shards(tensors)
    if len(shards) == 1:
        save_file(shards[0], str(directory / "model.safetensors"), metadata={"format": "pt"})
        return
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, str(directory / name), metadata={"format": "pt"})
    index = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=1, sort_keys=True)
    (directory / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _shards(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        nbytes = tensor.numel() * tensor.element_size()
        if shards[-1] and size + nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += nbytes
    return shards


def publish(partial: Path, final: Path) -> None:
    """Sync a finished folder to disk and give it its final name, replacing an earlier attempt."""
    try:
        sync_tree(partial)
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
        _sync(final.parent)
    except OSError as error:
        raise StorageError(f"{final} could not be written", why=str(error), hint="free disk space") from error


def sync_tree(directory: Path) -> None:
    """fsync every file and folder below `directory`, itself included."""
    for path in directory.rglob("*"):
        _sync(path)
    _sync(directory)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
