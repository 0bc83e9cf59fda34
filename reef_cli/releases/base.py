"""The content id of a base model: its configuration and weights by digest, without copying a byte.

The creation release of a chain names the base model it starts from; the bytes stay in the model store. Digests of large files
are remembered beside the store (`<home>/base-digests.json`), keyed by path, size and modification time, so that a second start
does not read 270 MB again.
"""

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path

from reef_cli.core.errors import ModelNotFound
from reef_cli.core.types import Artifact, ArtifactFile
from reef_cli.releases.artifact import content_id

_SUFFIXES = (".safetensors", ".gguf")
_NAMES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model")


def base_artifact(model_dir: Path, memory: Path | None = None) -> Artifact:
    """The artifact of kind `base` of a model folder; `ModelNotFound` when there is no model in it."""
    files = [path for path in sorted(model_dir.glob("*")) if path.name in _NAMES or path.suffix in _SUFFIXES]
    if not any(path.name == "config.json" or path.suffix == ".gguf" for path in files):
        raise ModelNotFound(
            f"no model in {model_dir}", why="neither config.json nor a GGUF file is there", hint="run `reef model pull`"
        )
    known = _recall(memory)
    facts = tuple(ArtifactFile(path.name, path.stat().st_size, _digest(path, known)) for path in files)
    _keep(memory, known)
    return Artifact(content_id("base", facts), "base", facts)


def upstream_artifact(url: str, model: str) -> Artifact:
    """The artifact of kind `base` of a model somebody else serves: only its name can be pinned."""
    text = json.dumps({"model": model, "url": url}, sort_keys=True)
    facts = (ArtifactFile("upstream.json", len(text.encode()), hashlib.sha256(text.encode()).hexdigest()),)
    return Artifact(content_id("base", facts), "base", facts)


def _digest(path: Path, known: dict[str, str]) -> str:
    facts = path.stat()
    key = f"{path.resolve()}|{facts.st_size}|{facts.st_mtime_ns}|{facts.st_ino}"
    if key not in known:
        with path.open("rb") as file:
            known[key] = hashlib.file_digest(file, "sha256").hexdigest()
    return known[key]


def _recall(memory: Path | None) -> dict[str, str]:
    if memory is not None:
        with suppress(OSError, ValueError):
            loaded = json.loads(memory.read_text())
            return {str(key): str(value) for key, value in loaded.items()}
    return {}


def _keep(memory: Path | None, known: dict[str, str]) -> None:
    """Losing this file only costs time, so a full disk is no error here."""
    if memory is None:
        return
    temporary = memory.with_name(f".{memory.name}-{os.getpid()}")
    with suppress(OSError):
        temporary.write_text(json.dumps(known))
        temporary.replace(memory)
