"""Bringing a file's bytes into the store: hashed once, on the disk, in a temporary file that nobody sees yet.

A file that is handed over is linked, not copied; what cannot be linked is copied by the kernel (a reflink where the file system
has them) while the copy is being hashed and written back. What is hashed is always what is kept.
"""

import errno
import hashlib
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

_CHUNK = 8 * 1024 * 1024
# File systems, kernels and pairs of them without copy_file_range.
_NO_COPY = frozenset({errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EBADF})


def link_hashed(source: Path, opened: BinaryIO, target: Path) -> tuple[str, int] | None:
    """`target` as another name of the file `opened` from `source`; its digest and size. None when a copy is needed:
    another file system, another file there by now, or one that changed while it was read."""
    fd = opened.fileno()
    before = os.fstat(fd)
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        return None
    linked = os.lstat(target)
    digest = hashlib.file_digest(opened, "sha256").hexdigest()  # type: ignore[arg-type] # every binary file has readinto
    after = os.fstat(fd)
    same = (before.st_ino, before.st_dev) == (linked.st_ino, linked.st_dev)
    still = (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns)
    if not same or not still:
        target.unlink()
        opened.seek(0)
        return None
    os.fchmod(fd, 0o444)
    os.fsync(fd)
    return digest, after.st_size


def copy_hashed(source: BinaryIO, target: Path) -> tuple[str, int]:
    """Copy to `target` (mode 0444) and make it durable; hashing and writing back go on beside the copying."""
    fd = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o444)
    digest = hashlib.sha256()
    try:
        with ThreadPoolExecutor(1) as hasher, ThreadPoolExecutor(1) as flusher:
            size, hashed, flushed = 0, _done(), _done()
            while count := _copy(source, fd, size):
                hashed.result()
                hashed = hasher.submit(_hash, digest, fd, size, count)
                size += count
                if flushed.done():
                    flushed.result()
                    flushed = flusher.submit(os.fdatasync, fd)
            hashed.result()
            flushed.result()
        os.fsync(fd)
    finally:
        os.close(fd)
    return digest.hexdigest(), size


def _done() -> "Future[None]":
    future: Future[None] = Future()
    future.set_result(None)
    return future


def _copy(source: BinaryIO, fd: int, offset: int) -> int:
    """Some bytes more of `source` at `offset` of the copy; 0 at the end."""
    try:
        return os.copy_file_range(source.fileno(), fd, _CHUNK, None, offset)
    except OSError as error:
        if error.errno not in _NO_COPY:
            raise
    part = memoryview(source.read(_CHUNK))
    count = len(part)
    while part:
        written = os.pwrite(fd, part, offset)
        part, offset = part[written:], offset + written
    return count


def _hash(digest: "hashlib._Hash", fd: int, offset: int, count: int) -> None:
    while count:
        part = os.pread(fd, min(count, 1024 * 1024), offset)
        digest.update(part)
        offset, count = offset + len(part), count - len(part)
