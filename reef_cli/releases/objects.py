"""Large files by digest, in the layout Git LFS itself uses: `<repo>/lfs/objects/aa/bb/<sha256>`.

Reef reads and writes this store by its own code, so that no program is needed; where `git-lfs` is installed it finds its
own store. An object appears under its name only when it is complete, read-only and on the disk (write, fsync, rename, fsync
of the folder). Equal bytes are kept once. An object may instead be kept as its difference to another one, under `lfs/deltas`:
it is still there, is read through `open`, and needs its base. Does not know which release needs which object.
"""

import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from reef_cli.core.errors import StorageError
from reef_cli.releases import delta
from reef_cli.releases.intake import copy_hashed, link_hashed

POINTER_VERSION = "https://git-lfs.github.com/spec/v1"


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
        self.deltas = repo / "lfs" / "deltas"
        self.temporary = repo / "lfs" / "tmp"
        self._facts: dict[str, delta.Delta] = {}

    def path(self, oid: str) -> Path:
        """Where the whole object is, if it is kept whole."""
        return self.root / oid[:2] / oid[2:4] / oid

    def delta_path(self, oid: str) -> Path:
        return self.deltas / oid[:2] / oid[2:4] / oid

    # What is there

    def has(self, oid: str, size: int) -> bool:
        """Whether the object is there in full length, whole or with all it is made from; the digest is `verify`'s business."""
        if self.whole(oid, size):
            return True
        facts = self.facts(oid)
        return facts is not None and facts.size == size and self.has(facts.base, facts.base_size)

    def whole(self, oid: str, size: int) -> bool:
        """Whether the object is kept whole."""
        try:
            return os.stat(self.path(oid)).st_size == size  # noqa: PTH116 - called per release of a listing; half the cost of Path.stat
        except FileNotFoundError:
            return False

    def facts(self, oid: str) -> delta.Delta | None:
        """What an object that is kept as a delta is made from; None when it is not. Asks the disk each time."""
        path = self.delta_path(oid)
        if not path.exists():
            return None
        if oid not in self._facts:
            with path.open("rb") as file:
                self._facts[oid] = delta.read_facts(file)
        return self._facts[oid]

    def depth(self, oid: str) -> int:
        """How many deltas lie between an object and a whole one."""
        if self.path(oid).exists() or (facts := self.facts(oid)) is None:
            return 0
        return 1 + self.depth(facts.base)

    def digest_present(self, oid: str) -> bool:
        """Whether all files an object is read from are there."""
        return all(self.path(name).exists() or self.delta_path(name).exists() for name in self.closure([oid]))

    def closure(self, oids: Iterable[str]) -> set[str]:
        """The objects and everything they are made from."""
        needed: set[str] = set()
        waiting = list(oids)
        while waiting:
            oid = waiting.pop()
            if oid not in needed:
                needed.add(oid)
                if not self.path(oid).exists() and (facts := self.facts(oid)) is not None:
                    waiting.append(facts.base)
        return needed

    def all(self) -> Iterator[tuple[str, int, float]]:
        """`(oid, bytes on disk, modified)` of every object, one in both forms twice."""
        for path in (*self.root.glob("??/??/*"), *self.deltas.glob("??/??/*")):
            with suppress(FileNotFoundError):
                facts = path.stat()
                yield path.name, facts.st_size, facts.st_mtime

    # Writing

    def stage(self, source: BinaryIO, take: Path | None = None) -> Staged:
        """Bring `source` into a temporary file while hashing it; it is dropped when the store has the bytes.

        With `take`, the path `source` was opened from, the file itself becomes the object where the file system can link it.
        """
        self.temporary.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary = self._temporary()
        try:
            found = link_hashed(take, source, temporary) if take is not None else None
            oid, size = found or copy_hashed(source, temporary)
            if self.has(oid, size):
                temporary.unlink()
                return Staged(oid, size, None)
            return Staged(oid, size, temporary)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def place(self, staged: Staged) -> None:
        """Make a staged object visible, durably."""
        if staged.temporary is not None:
            self._reveal(staged.temporary, self.path(staged.oid), self.root)

    def discard(self, staged: Staged) -> None:
        if staged.temporary is not None:
            staged.temporary.unlink(missing_ok=True)

    def remove(self, oid: str) -> int:
        """Delete an object in whatever form; the bytes it had on disk."""
        self._facts.pop(oid, None)
        return sum(_unlink(path) for path in (self.path(oid), self.delta_path(oid)))

    # Deltas

    def prepare_delta(self, oid: str, base: str) -> Path | None:
        """A temporary file with `oid` as its difference to `base`, proven to give the same bytes; None when it saves little."""
        self.temporary.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary = self._temporary()
        try:
            with self.open(base) as below, self.open(oid) as above:
                sizes = (os.fstat(below.fileno()).st_size, os.fstat(above.fileno()).st_size)
                skip, width = delta.alignment(below, above)
                with temporary.open("xb") as out:
                    delta.encode(below, above, out, delta.Delta(base, *sizes, skip, width))
                    out.flush()
                    os.fsync(out.fileno())
                if temporary.stat().st_size > 0.8 * sizes[1] or not _makes(below, temporary, oid):
                    temporary.unlink()
                    return None
            temporary.chmod(0o444)
            return temporary
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def swap(self, oid: str, prepared: Path) -> int:
        """Keep an object as the prepared delta from now on; the bytes saved. The delta is on the disk before the whole goes."""
        size = prepared.stat().st_size
        self._facts.pop(oid, None)
        self._reveal(prepared, self.delta_path(oid), self.deltas)
        return _unlink(self.path(oid)) - size

    def open(self, oid: str) -> FileIO:
        """An object's bytes, made from its deltas where it is not whole. `StorageError` when they are damaged.

        What is made is checked against the digest; whoever reads a whole object checks it when it matters.
        """
        with suppress(FileNotFoundError):
            return FileIO(self.path(oid))
        temporary = self._temporary()
        try:
            self.restore(oid, temporary)
            return FileIO(temporary)
        finally:
            temporary.unlink(missing_ok=True)

    def restore(self, oid: str, target: Path) -> None:
        """Write an object that is kept as a delta to `target`. `FileNotFoundError` when a piece of it is gone."""
        facts = self.facts(oid)
        if facts is None:
            raise FileNotFoundError(f"no object {oid}")
        self.temporary.mkdir(parents=True, exist_ok=True, mode=0o700)
        digest = hashlib.sha256()
        with self.open(facts.base) as base, self.delta_path(oid).open("rb") as packed, target.open("xb") as out:
            for part in delta.decode(base, packed):
                digest.update(part)
                out.write(part)
        if digest.hexdigest() != oid:
            raise StorageError(f"object {oid[:12]} is damaged", why="its digest differs", hint="run `reef release verify`")

    @contextmanager
    def made_whole(self, oids: Iterable[str]) -> Iterator[None]:
        """Objects as whole files under their names for a while, for programs that know nothing else (git-lfs)."""
        made: list[Path] = []
        try:
            for oid in oids:
                if not self.path(oid).exists():
                    temporary = self._temporary()
                    self.restore(oid, temporary)
                    self._reveal(temporary, self.path(oid), self.root)
                    made.append(self.path(oid))
            yield
        finally:
            for path in made:
                _unlink(path)

    def digest(self, oid: str) -> str | None:
        """The object's real sha256, re-read from disk; None when it, or what it is made from, is gone."""
        try:
            with self.open(oid) as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except FileNotFoundError:
            return None
        except StorageError as error:
            return error.message

    def link(self, oid: str, target: Path) -> None:
        """An object as the file `target`: a hard link where possible, a copy on other file systems, made when it is a delta."""
        source = self.path(oid)
        if not source.exists() and self.facts(oid) is not None:
            self.restore(oid, target)
            return
        try:
            os.link(source, target)
        except OSError:
            shutil.copyfile(source, target)

    def _temporary(self) -> Path:
        return self.temporary / f"{os.getpid()}-{os.urandom(8).hex()}"

    def _reveal(self, temporary: Path, target: Path, root: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.replace(target)
        for folder in (target.parent, target.parent.parent, root):
            fsync_folder(folder)


def _makes(base: BinaryIO, prepared: Path, oid: str) -> bool:
    digest = hashlib.sha256()
    with prepared.open("rb") as file:
        for part in delta.decode(base, file):
            digest.update(part)
    return digest.hexdigest() == oid


def _unlink(path: Path) -> int:
    """Delete a file and the folders it leaves empty; the bytes it had, 0 when it is gone already."""
    try:
        size = path.stat().st_size
        path.unlink()
    except FileNotFoundError:
        return 0
    for folder in (path.parent, path.parent.parent):
        with suppress(OSError):
            folder.rmdir()
    return size
