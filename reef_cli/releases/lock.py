"""Locks between processes that share a release store: `flock` on two files beside the repository.

`writing` is shared by everyone who adds objects and exclusive to the garbage collector, which may therefore delete what
nobody refers to without racing a publisher. `moving` is exclusive and held only while refs change. Both die with their
process. Threads of one process are kept apart because every acquisition opens the file anew.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Locks:
    """The two lock files of one store."""

    def __init__(self, folder: Path) -> None:
        self._objects = folder / "reef-objects.lock"
        self._refs = folder / "reef-refs.lock"

    @contextmanager
    def writing(self) -> Iterator[int]:
        with _held(self._objects, fcntl.LOCK_SH) as fd:
            yield fd

    @contextmanager
    def collecting(self) -> Iterator[int]:
        with _held(self._objects, fcntl.LOCK_EX) as fd:
            yield fd

    @contextmanager
    def moving(self) -> Iterator[int]:
        with _held(self._refs, fcntl.LOCK_EX) as fd:
            yield fd


@contextmanager
def _held(path: Path, kind: int) -> Iterator[int]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, kind)
        yield fd
    finally:
        # Not unlocked first: a git child may share the descriptor and must keep the lock until it has ended.
        os.close(fd)
