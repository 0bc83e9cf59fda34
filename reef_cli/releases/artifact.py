"""What may become an artifact: the rules for files, and the content id.

Weights are safetensors only; nothing that can run code when it is loaded (pickle in any dress) gets into the store, nor
symlinks, special files, or names that could leave a folder. The same name rules are applied again when files are written
out, because a chain may have been fetched from elsewhere.
"""

import hashlib
import json
import os
import stat
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast, get_args

from reef_cli.core.errors import UnsupportedArtifact
from reef_cli.core.ids import ContentId
from reef_cli.core.types import ArtifactFile, Surface

Kind = Literal["base", "lora", "checkpoint", "harness", "routing"]
KINDS: tuple[str, ...] = get_args(Kind)
SURFACES: dict[str, Surface] = {
    "base": Surface.WEIGHTS,
    "lora": Surface.WEIGHTS,
    "checkpoint": Surface.WEIGHTS,
    "harness": Surface.HARNESS,
    "routing": Surface.ROUTING,
}
_PICKLES = frozenset({".pkl", ".pickle", ".pt", ".pth", ".ckpt", ".joblib", ".npy", ".npz"})
_WEIGHT_DENIED = _PICKLES | {".bin", ".h5", ".msgpack", ".onnx", ".py", ".so"}
_HEADER_LIMIT = 100 * 1024 * 1024
_DTYPES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64"), 8),
}


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of a folder about to be stored."""

    path: str
    source: Path

    def open(self) -> BinaryIO:
        """The file's bytes; never follows a link that appeared since the scan."""
        fd = os.open(self.source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        file = os.fdopen(fd, "rb", buffering=0)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            file.close()
            raise UnsupportedArtifact(f"{self.path} is not a regular file")
        return cast(BinaryIO, file)


def as_kind(kind: str) -> Kind:
    """`kind` checked against the closed list."""
    if kind not in KINDS:
        raise UnsupportedArtifact(f"unknown kind of artifact: {kind!r}", hint=f"one of {', '.join(KINDS)}")
    return cast(Kind, kind)


def check_path(path: str) -> str:
    """`path` when it is a plain relative POSIX path below its root; `UnsupportedArtifact` else."""
    parts = path.split("/")
    bad = (
        not path
        or any(part in ("", ".", "..") or part.lower() == ".git" for part in parts)
        or any(ord(char) < 32 or char in "\\\x7f" for char in path)
        or len(path) > 1024
        or not _encodable(path)
    )
    if bad:
        raise UnsupportedArtifact(
            f"an artifact cannot hold a file named {path!r}", why="names must stay inside the artifact's folder"
        )
    return path


def _encodable(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def scan(directory: Path, kind: Kind) -> list[SourceFile]:
    """The files below `directory`, sorted by path, after every rule that can be checked without reading them."""
    if not directory.is_dir() or directory.is_symlink():
        raise UnsupportedArtifact(f"no folder at {directory.name!r}", hint="an artifact is a folder of files")
    files = sorted(_walk(directory, ""), key=lambda file: file.path)
    denied = _WEIGHT_DENIED if SURFACES[kind] is Surface.WEIGHTS else _PICKLES
    for file in files:
        if Path(file.path).suffix.lower() in denied:
            raise UnsupportedArtifact(
                f"{file.path} is not allowed in a {kind} artifact",
                why="such files can run code when they are loaded, or are not safetensors",
                hint="save weights as safetensors",
            )
    _check_members(kind, {file.path for file in files})
    return files


def _walk(folder: Path, prefix: str) -> Iterator[SourceFile]:
    with os.scandir(folder) as entries:
        for entry in entries:
            path = check_path(prefix + entry.name)
            if entry.is_symlink():
                raise UnsupportedArtifact(f"{path} is a symbolic link", hint="copy the file itself into the folder")
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(Path(entry.path), f"{path}/")
            elif entry.is_file(follow_symlinks=False):
                yield SourceFile(path, Path(entry.path))
            else:
                raise UnsupportedArtifact(f"{path} is neither a file nor a folder")


def _check_members(kind: Kind, names: set[str]) -> None:
    needed = {"lora": ("adapter_config.json", "adapter_model.safetensors"), "checkpoint": ("config.json",)}.get(kind, ())
    for name in needed:
        if name not in names:
            raise UnsupportedArtifact(f"a {kind} artifact needs {name}", hint="save it with save_pretrained()")
    if kind == "checkpoint" and not any(name.endswith(".safetensors") for name in names):
        raise UnsupportedArtifact("a checkpoint artifact needs at least one safetensors file")


def check_bytes(path: str, file: BinaryIO, size: int, kind: Kind) -> None:
    """Rules about a file's content: pickles under any name, and sound safetensors headers."""
    start = file.read(64)
    file.seek(0)
    if (start[:1] == b"\x80" and start[1:2] in b"\x02\x03\x04\x05") or b"data.pkl" in start:
        raise UnsupportedArtifact(f"{path} is a pickle", why="unpickling runs code", hint="save weights as safetensors")
    if path.endswith(".safetensors"):
        keys = _safetensors_keys(path, file, size)
        if kind == "lora" and not any(".lora_A." in key for key in keys):
            raise UnsupportedArtifact(f"{path} holds no LoRA tensors", why="no key contains .lora_A.", hint="save with PEFT")


def _safetensors_keys(path: str, file: BinaryIO, size: int) -> list[str]:
    """Tensor names of a safetensors file whose header agrees with its length."""
    try:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > min(size - 8, _HEADER_LIMIT):
            raise ValueError("the header is longer than the file")
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        ends = [_tensor_end(tensor, size - 8 - length) for tensor in header.values()]
        if max(ends, default=0) != size - 8 - length:
            raise ValueError("the tensors do not fill the file")
    except (ValueError, TypeError, KeyError, AttributeError, struct.error) as error:
        raise UnsupportedArtifact(f"{path} is not a sound safetensors file", why=str(error)) from error
    return list(header)


def _tensor_end(tensor: Mapping[str, Any], room: int) -> int:
    begin, end = tensor["data_offsets"]
    count = 1
    for extent in tensor["shape"]:
        count *= extent
    width = _DTYPES.get(tensor["dtype"])
    if not 0 <= begin <= end <= room or (width is not None and count * width != end - begin):
        raise ValueError("a tensor lies outside the file or does not fit its shape")
    return int(end)


def content_id(kind: str, files: Iterable[ArtifactFile]) -> ContentId:
    """`sha256:<hex>` over the kind and the sorted list of (path, mode, digest)."""
    digest = hashlib.sha256(f"reef artifact 1\n{kind}\n".encode())
    for file in sorted(files, key=lambda file: file.path):
        mode = "100755" if file.executable else "100644"
        digest.update(f"{mode} {file.sha256} {file.path}\n".encode())
    return ContentId(f"sha256:{digest.hexdigest()}")


def about(kind: Kind, small: Mapping[str, bytes]) -> dict[str, Any]:
    """Facts worth a model card, read from an artifact's own configuration files."""
    name = {"lora": "adapter_config.json", "checkpoint": "config.json"}.get(kind, "")
    try:
        config = json.loads(small.get(name, b"{}"))
    except ValueError as error:
        raise UnsupportedArtifact(f"{name} is not JSON", why=str(error)) from error
    if not isinstance(config, dict):
        raise UnsupportedArtifact(f"{name} must hold an object")
    if kind == "lora" and config.get("peft_type", "LORA") != "LORA":
        raise UnsupportedArtifact("adapter_config.json is not of a LoRA adapter", why=f"peft_type is {config['peft_type']!r}")
    wanted = ("base_model_name_or_path", "r", "lora_alpha", "target_modules", "revision", "model_type", "architectures")
    return {key: config[key] for key in wanted if config.get(key) is not None}
