"""Files on the user's machine: safe names, atomic writes that skip identical content, locks, and where things lie.

<base>/<adapter>/agent/<version>/         the agent, in a prefix of its own
<base>/<adapter>/client/reef-client.pyz   this program
<base>/<adapter>/scenarios/<scenario>/    install.json, token (0600), trees/ (as released), home/ (as used), spool/
<base>/<adapter>/owned.json               what was created outside, for uninstalling
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Refused(Exception):
    """Stop with a message for a person; `code` is the exit status."""

    def __init__(self, message: str, hint: str = "", code: int = 1) -> None:
        super().__init__(message)
        self.hint = hint
        self.code = code


def safe(path: str) -> str:
    """`path` if it is relative and stays inside its folder; the same rule the server applies, checked again here."""
    parts = path.split("/")
    bad = not path or len(path) > 240 or path[0] in "/~" or "\\" in path or any(ord(char) < 32 for char in path)
    if bad or any(part in ("", ".", "..") for part in parts) or any(part.lower() == ".git" for part in parts):
        raise Refused(
            f"the release holds a file named {path!r}", "names must stay inside the installation; nothing was written"
        )
    return path


def inside(root: Path, path: str) -> Path:
    """`root/path`, refusing to pass through a link that leads elsewhere."""
    target = root / safe(path)
    folder = target.parent
    while folder != root:
        if folder.is_symlink():
            raise Refused(f"{folder} is a link", "remove it, then try again")
        folder = folder.parent
    return target


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def file_digest(path: Path) -> str | None:
    """The digest of a regular file, or None when there is none."""
    if path.is_symlink() or not path.is_file():
        return None
    return digest(path.read_bytes())


def put(path: Path, data: bytes, mode: int = 0o644) -> bool:
    """Write atomically; False when the file already is exactly this, in which case nothing is touched."""
    if file_digest(path) == digest(data) and (path.stat().st_mode & 0o777) == mode:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=".reef-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(mode)
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise
    return True


def put_json(path: Path, value: Any, mode: int = 0o644) -> bool:
    return put(path, (json.dumps(value, indent=1, sort_keys=True) + "\n").encode(), mode)


def get_json(path: Path, default: Any = None) -> Any:
    """The JSON value of a file; `default` when it is missing or torn."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return default


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """An exclusive lock between processes, released when its holder dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def base_folder(environment: dict[str, str]) -> Path:
    """Where installations lie: `REEF_HARNESS_HOME`, else `reef-harness` in the user's data folder."""
    if environment.get("REEF_HARNESS_HOME"):
        return Path(environment["REEF_HARNESS_HOME"]).absolute()
    home = environment.get("HOME") or str(Path.home())
    return Path(environment.get("XDG_DATA_HOME") or Path(home, ".local", "share")) / "reef-harness"


def bin_folder(environment: dict[str, str]) -> Path:
    """Where the wrapper goes: `REEF_BIN_DIR`, else `~/.local/bin`."""
    home = environment.get("HOME") or str(Path.home())
    return Path(environment.get("REEF_BIN_DIR") or Path(home, ".local", "bin")).absolute()


class Place:
    """The folders of one adapter and scenario."""

    def __init__(self, base: Path, adapter: str, scenario: str) -> None:
        self.base = base
        self.adapter = base / adapter
        self.root = self.adapter / "scenarios" / scenario
        self.spec = self.root / "install.json"
        self.token = self.root / "token"
        self.trees = self.root / "trees"
        self.home = self.root / "home"
        self.synced = self.root / "synced.json"
        self.spool = self.root / "spool"
        self.setup = self.root / "setup.json"
        self.owned = self.adapter / "owned.json"
        self.client = self.adapter / "client" / "reef-client.pyz"

    @property
    def tree(self) -> Path:
        """The released files in force: the folder that `install.json` names."""
        return self.trees / safe(str((get_json(self.spec) or {}).get("tree_name", "none")))

    def agent(self, version: str) -> Path:
        return self.adapter / "agent" / version
