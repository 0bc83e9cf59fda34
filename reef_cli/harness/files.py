"""Files as values: bytes and a run bit. How a set of them is written to and read from a folder without following links."""

import base64
import binascii
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reef_cli.core.errors import UnsupportedArtifact
from reef_cli.harness import paths

MAX_FILE = 1 << 20
MAX_TOTAL = 16 << 20


@dataclass(frozen=True, slots=True)
class TreeFile:
    """Content of one file; `executable` is its run bit."""

    data: bytes
    executable: bool = False


def parse(path: str, raw: Any) -> TreeFile:
    """A file from its wire form: text, or `{text | base64, executable?}`."""
    if isinstance(raw, str):
        return TreeFile(raw.encode())
    try:
        extra = set(raw) - {"text", "base64", "executable"}
        if extra or len({"text", "base64"} & set(raw)) != 1:
            raise ValueError("give exactly one of text and base64, and optionally executable")
        data = raw["text"].encode() if "text" in raw else base64.b64decode(raw["base64"], validate=True)
        executable = raw.get("executable", False)
        if not isinstance(executable, bool):
            raise ValueError("executable is true or false")
        return TreeFile(data, executable)
    except (TypeError, ValueError, AttributeError, binascii.Error) as error:
        raise UnsupportedArtifact(f"the file {path!r} has no readable content", why=str(error)) from error


def wire(file: TreeFile) -> dict[str, Any]:
    """The one canonical wire form: text when the bytes are UTF-8, else base64; the run bit only when set."""
    try:
        body: dict[str, Any] = {"text": file.data.decode()}
    except UnicodeDecodeError:
        body = {"base64": base64.b64encode(file.data).decode()}
    return body | ({"executable": True} if file.executable else {})


def write(files: Mapping[str, TreeFile], directory: Path) -> None:
    """Write files below `directory`, which must be absent or empty; names are checked first, so a bad set writes nothing."""
    paths.check_all(files)
    if directory.exists() and any(directory.iterdir()):
        raise UnsupportedArtifact(f"the folder {directory.name!r} is not empty")
    directory.mkdir(parents=True, exist_ok=True)
    for path, file in files.items():
        target = directory / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.data)
        target.chmod(0o755 if file.executable else 0o644)


def read(directory: Path) -> dict[str, TreeFile]:
    """All files below `directory`, sorted by path. Links and special files are refused, sizes are bounded."""
    found: dict[str, TreeFile] = {}
    total = 0
    for root, folders, names in os.walk(directory, followlinks=False):
        for name in folders + names:
            full = Path(root, name)
            status = full.lstat()
            path = paths.check(full.relative_to(directory).as_posix())
            if stat.S_ISDIR(status.st_mode):
                continue
            if not stat.S_ISREG(status.st_mode):
                raise UnsupportedArtifact(f"{path} is a link or a special file", hint="copy the file itself into the folder")
            total += status.st_size
            if status.st_size > MAX_FILE or total > MAX_TOTAL:
                raise UnsupportedArtifact(f"{path} is too large", why=f"limit {MAX_FILE} bytes a file, {MAX_TOTAL} in all")
            found[path] = TreeFile(full.read_bytes(), bool(status.st_mode & 0o100))
    return dict(sorted(found.items()))
