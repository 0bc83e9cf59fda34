"""Large files by digest, in the layout Git LFS itself uses: `<repo>/lfs/objects/aa/bb/<sha256>`.

Reef reads and writes this store by its own code, so that no program is needed; where `git-lfs` is installed it finds its
own store. An object appears under its name only when it is complete, read-only and on the disk (write, fsync, rename, fsync
of the folder). Equal bytes are kept once. Does not know which release needs which object.
"""

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

POINTER_VERSION = "https://git-lfs.github.com/spec/v1"
_CHUNK = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Staged:
    """A file read, hashed and (unless the store has it already) written to `temporary`, fsynced, not yet visible."""

    oid: str
    size: int
    temporary: Path | None


def pointer(oid: str, size: int) -> bytes:
    """The Git LFS pointer file (version 1) of an object."""
    return f"version {POINTER_VERSION}\noid sha256:{oid}\nsize {size}\n".encode()


def fsync_folder(folder: Path) -> None:
    """Make names in `folder` survive a power loss."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class ObjectStore:
    """The objects of one repository."""

    def __init__(self, repo: Path) -> None:
        self.root = repo / "lfs" / "objects"
        self.temporary = repo / "lfs" / "tmp"

    def path(self, oid: str) -> Path:
        return self.root / oid[:2] / oid[2:4] / oid

    def has(self, oid: str, size: int) -> bool:
        """Whether the object is there in full length; the digest is `verify`'s business."""
        try:
            return os.stat(self.path(oid)).st_size == size  # noqa: PTH116 - called per release of a listing; half the cost of Path.stat
        except FileNotFoundError:
            return False

    def stage(self, source: BinaryIO) -> Staged:
        """Copy `source` into a temporary file while hashing it; the copy is dropped when the store has the bytes."""
        self.temporary.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary = self.temporary / f"{os.getpid()}-{os.urandom(8).hex()}"
        try:
            oid, size = _copy_hashed(source, temporary)
            if self.has(oid, size):
                temporary.unlink()
                return Staged(oid, size, None)
            return Staged(oid, size, temporary)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def place(self, staged: Staged) -> None:
        """Make a staged object visible, durably."""
        if staged.temporary is None:
            return
        target = self.path(staged.oid)
        target.parent.mkdir(parents=True, exist_ok=True)
        staged.temporary.replace(target)
        for folder in (target.parent, target.parent.parent, self.root):
            fsync_folder(folder)

    def discard(self, staged: Staged) -> None:
        if staged.temporary is not None:
            staged.temporary.unlink(missing_ok=True)

    def digest(self, oid: str) -> str | None:
        """The object's real sha256, re-read from disk; None when it is gone."""
        try:
            with self.path(oid).open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except FileNotFoundError:
            return None

    def remove(self, oid: str) -> int:
        """Delete an object; the bytes it had."""
        path = self.path(oid)
        try:
            size = path.stat().st_size
            path.unlink()
        except FileNotFoundError:
            return 0
        for folder in (path.parent, path.parent.parent):
            with suppress(OSError):
                folder.rmdir()
        return size

    def all(self) -> Iterator[tuple[str, int, float]]:
        """`(oid, size, modified)` of every object."""
        for path in self.root.glob("??/??/*"):
            with suppress(FileNotFoundError):
                facts = path.stat()
                yield path.name, facts.st_size, facts.st_mtime


def _copy_hashed(source: BinaryIO, target: Path) -> tuple[str, int]:
    """One pass: what is hashed is what is written, also when somebody changes the source meanwhile.

    Hashing a chunk overlaps with writing it; both leave the interpreter free.
    """
    digest = hashlib.sha256()
    size = 0
    buffer = memoryview(bytearray(_CHUNK))
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o444)
    try:
        with ThreadPoolExecutor(1) as hasher:
            while count := source.readinto(buffer):  # type: ignore[attr-defined]
                part = buffer[:count]
                hashed = hasher.submit(digest.update, part)
                size += count
                while part:
                    part = part[os.write(fd, part) :]
                hashed.result()
        os.fsync(fd)
    finally:
        os.close(fd)
    return digest.hexdigest(), size
