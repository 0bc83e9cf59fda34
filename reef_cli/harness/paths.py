"""Names of files inside trees and installations: relative POSIX paths that cannot leave their folder on any system.

The same rule is applied at admission, when a tree is read back, and again by the installer on the user's machine.
"""

from collections.abc import Iterable
from pathlib import PurePosixPath

from reef_cli.core.errors import UnsupportedArtifact

LIMIT = 240
_REFUSED_SUFFIXES = frozenset({".pkl", ".pickle", ".pt", ".pth", ".ckpt", ".joblib", ".npy", ".npz"})
_DEVICES = frozenset({"con", "prn", "aux", "nul"})


def fault(path: str) -> str | None:
    """Why `path` may not be a file of a tree, or None when it may."""
    if not isinstance(path, str) or not path or len(path) > LIMIT:
        return f"the name is empty or longer than {LIMIT} characters"
    if path.startswith(("/", "~")) or (len(path) > 1 and path[1] == ":"):
        return "absolute paths are refused"
    if any(ord(char) < 32 or char in '\\\x7f"<>|*?' for char in path) or not _encodable(path):
        return "the name holds a control or shell character"
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts):
        return "the path could leave its folder"
    if any(part.lower() == ".git" or part.lower().split(".")[0] in _DEVICES or part[-1] in " ." for part in parts):
        return "the name is reserved"
    if PurePosixPath(path).suffix.lower() in _REFUSED_SUFFIXES:
        return "serialised objects can run code when they are loaded"
    return None


def check(path: str, where: str = "a tree") -> str:
    """`path` itself when it is safe; `UnsupportedArtifact` with the reason else."""
    reason = fault(path)
    if reason is not None:
        raise UnsupportedArtifact(f"{where} cannot hold a file named {path!r}", why=reason, hint="use a plain relative path")
    return path


def check_all(paths: Iterable[str], where: str = "a tree") -> None:
    """Every path is safe, none collides with another when case is ignored, and none is both a file and a folder."""
    seen: dict[str, str] = {}
    for path in paths:
        check(path, where)
        folded = path.casefold()
        if folded in seen:
            raise UnsupportedArtifact(f"{where} holds {path!r} twice", why=f"it collides with {seen[folded]!r}")
        seen[folded] = path
    for folded, path in seen.items():
        parent = PurePosixPath(folded).parent
        while parent.name:
            if str(parent) in seen:
                raise UnsupportedArtifact(f"{where} holds {seen[str(parent)]!r} both as a file and as the folder of {path!r}")
            parent = parent.parent


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
