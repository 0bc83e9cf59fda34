"""Small artifacts made on the spot, and a store to put them in."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from reef_cli.core.types import Artifact, Draft, Operation, Surface
from reef_cli.releases import ReleaseService

Make = Callable[..., Path]


def write_safetensors(path: Path, tensors: dict[str, bytes]) -> None:
    """A sound safetensors file of uint8 vectors."""
    header, data = {}, b""
    for name, value in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(value)], "data_offsets": [len(data), len(data) + len(value)]}
        data += value
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def write_lora(folder: Path, data: bytes) -> None:
    """A sound PEFT folder whose one tensor holds these bytes."""
    config = {"peft_type": "LORA", "base_model_name_or_path": "/home/someone/models/tiny", "r": 4, "lora_alpha": 8}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    write_safetensors(folder / "adapter_model.safetensors", {"base_model.model.layers.0.q_proj.lora_A.weight": data})


@pytest.fixture
def safetensors() -> Callable[[Path, dict[str, bytes]], None]:
    return write_safetensors


@pytest.fixture
def service(tmp_path: Path) -> ReleaseService:
    return ReleaseService(tmp_path / "home")


@pytest.fixture
def tree(tmp_path: Path) -> Make:
    """`tree({"path": text or bytes})` writes a folder of its own and gives its path."""

    def make(files: dict[str, str | bytes]) -> Path:
        folder = tmp_path / f"tree-{os.urandom(4).hex()}"
        folder.mkdir()
        for name, content in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        return folder

    return make


@pytest.fixture
def adapter(tmp_path: Path) -> Make:
    """`adapter(size, seed)` makes a PEFT folder whose weights have `size` bytes."""

    def make(size: int = 200_000, seed: int = 0) -> Path:
        folder = tmp_path / f"adapter-{size}-{seed}-{os.urandom(3).hex()}"
        folder.mkdir()
        write_lora(folder, bytes([seed % 251]) * size)
        return folder

    return make


@pytest.fixture
def draft() -> Callable[..., Draft]:
    """A training draft of an artifact, with what the caller wants changed."""

    def make(artifact: Artifact, **facts: object) -> Draft:
        surface = Surface.HARNESS if artifact.kind == "harness" else Surface.WEIGHTS
        values: dict[str, object] = {"operation": Operation.TRAINING, "author": "job", "evidence": {}, **facts}
        return Draft(artifact.content_id, artifact.kind, surface, **values)  # type: ignore[arg-type]

    return make
