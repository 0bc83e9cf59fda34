"""Stored contents: from a folder to a content id and back to a read-only folder.

A content is a git commit `refs/reef-content/<hex>` whose tree holds `content.json` (kind, files, where each file's bytes are)
and `artifact/` (small files as blobs, large ones as Git LFS pointers). The commit's date says when it was last stored, which
protects it from the garbage collector until somebody publishes it. Contents never change; equal contents are one.
`directory()` materialises under `<home>/artifacts/<hex>`, with hard links for large files. Does not know scenarios.
"""

import hashlib
import io
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from reef_cli.core.clock import Clock
from reef_cli.core.errors import NotRestorable, ReefError, StorageError
from reef_cli.core.ids import ContentId
from reef_cli.core.types import Artifact, ArtifactFile
from reef_cli.releases.artifact import Kind, SourceFile, about, as_kind, check_bytes, check_path, content_id, scan
from reef_cli.releases.git import Git, RefUpdate, TreeEntry
from reef_cli.releases.lock import Locks
from reef_cli.releases.objects import ObjectStore, Staged, fsync_folder, pointer
from reef_cli.releases.routing import FILE as POLICY_FILE
from reef_cli.releases.routing import Policy
from reef_cli.releases.routing import read as read_policy

PREFIX = "refs/reef-content/"
# Files up to this size live in git itself; beyond it zlib, diffs and clones get slow for nothing.
INLINE_LIMIT = 100 * 1024


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file and where its bytes are: in git (`large` false), in the object store, or, for base models, nowhere."""

    file: ArtifactFile
    large: bool


@dataclass(frozen=True, slots=True)
class Content:
    """A content as the store knows it. `blob` is its `content.json`, `tree` its `artifact/` (None for base models)."""

    content_id: ContentId
    kind: Kind
    files: tuple[StoredFile, ...]
    about: Mapping[str, Any]
    blob: str
    tree: str | None

    @property
    def artifact(self) -> Artifact:
        return Artifact(self.content_id, self.kind, tuple(stored.file for stored in self.files))

    @property
    def large(self) -> tuple[tuple[str, int], ...]:
        """`(oid, size)` of the files in the object store."""
        return tuple((stored.file.sha256, stored.file.size) for stored in self.files if stored.large)

    @property
    def entries(self) -> dict[str, TreeEntry]:
        """The content as part of a commit's tree."""
        entries = {"content.json": TreeEntry("", self.blob)}
        if self.tree is not None:
            entries["artifact"] = TreeEntry("", self.tree, "040000")
        return entries


@dataclass(slots=True)
class _Intake:
    """What reading a folder has gathered so far."""

    files: list[StoredFile] = field(default_factory=list)
    small: dict[str, bytes] = field(default_factory=dict)
    staged: list[Staged] = field(default_factory=list)


def hex_of(content: str) -> str:
    """The digest part of a content id, checked."""
    algorithm, _, digest = content.partition(":")
    if algorithm != "sha256" or len(digest) != 64 or set(digest) - set("0123456789abcdef"):
        raise NotRestorable(f"{content!r} is not a content id", hint="content ids look like sha256:<64 hex digits>")
    return digest


@contextmanager
def storage_errors(what: str) -> Iterator[None]:
    """Failures of the disk as `StorageError`; nothing has been published when it is raised."""
    try:
        yield
    except ReefError:
        raise
    except OSError as error:
        raise StorageError(
            f"{what} failed: {error.strerror or error}", why="nothing was published", hint="free space on the releases' disk"
        ) from error


class Contents:
    """All contents of one store."""

    def __init__(self, home: Path, git: Git, objects: ObjectStore, locks: Locks, clock: Clock) -> None:
        self._artifacts = home / "artifacts"
        self._git = git
        self._objects = objects
        self._locks = locks
        self._clock = clock
        self._cache: dict[ContentId, Content] = {}
        self._mutex = threading.Lock()

    def store(self, directory: Path, kind: Kind, *, take: bool = False) -> Artifact:
        """Take the bytes of `directory`. `UnsupportedArtifact`, `StorageError`; a failure leaves nothing visible.

        With `take` the large files themselves become the store's where they can be linked: nobody may write to them any more.
        """
        sources = scan(directory, kind)
        intake = _Intake()
        with self._locks.writing(), storage_errors("storing the artifact"):
            try:
                self._take_all(sources, kind, intake, take=take)
                content = self._write(kind, intake.files, intake.small, about(kind, intake.small))
                for staged in intake.staged:
                    self._objects.place(staged)
                self._remember(content)
            finally:
                for staged in intake.staged:
                    self._objects.discard(staged)
        return content.artifact

    def _take_all(self, sources: Sequence[SourceFile], kind: Kind, intake: _Intake, *, take: bool) -> None:
        """Several files at once: hashing leaves the interpreter free, and shards of a checkpoint are large."""
        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
            work = [pool.submit(self._take, source, kind, intake, take=take) for source in sources]
        for future in work:
            future.result()
        intake.files.sort(key=lambda stored: stored.file.path)

    def _take(self, source: SourceFile, kind: Kind, intake: _Intake, *, take: bool) -> None:
        with source.open() as file:
            facts = os.fstat(file.fileno())
            executable = bool(facts.st_mode & 0o100)
            check_bytes(source.path, file, facts.st_size, kind)
            file.seek(0)
            if facts.st_size > INLINE_LIMIT:
                staged = self._objects.stage(file, source.source if take and not executable else None)
                intake.staged.append(staged)
                intake.files.append(StoredFile(ArtifactFile(source.path, staged.size, staged.oid, executable), large=True))
                return
            data = file.read(INLINE_LIMIT + 1)
        check_bytes(source.path, io.BytesIO(data), len(data), kind)
        intake.small[source.path] = data
        digest = hashlib.sha256(data).hexdigest()
        intake.files.append(StoredFile(ArtifactFile(source.path, len(data), digest, executable), large=False))

    def register(self, artifact: Artifact) -> Content:
        """A content whose bytes live elsewhere (a base model): only its facts are kept."""
        with self._locks.writing(), storage_errors("recording the base model"):
            files = [StoredFile(file, large=False) for file in artifact.files]
            content = self._write("base", files, None, {}, artifact.content_id)
            return self._remember(content)

    def _write(
        self,
        kind: Kind,
        files: Sequence[StoredFile],
        small: Mapping[str, bytes] | None,
        facts: Mapping[str, Any],
        identifier: ContentId | None = None,
    ) -> Content:
        identifier = identifier or content_id(kind, (stored.file for stored in files))
        description = {
            "content_id": identifier,
            "kind": kind,
            "about": dict(facts),
            "files": [{**asdict(stored.file), "large": stored.large} for stored in files],
        }
        texts = [json.dumps(description, indent=1, sort_keys=True, ensure_ascii=False).encode()]
        if small is not None:
            texts += [pointer(s.file.sha256, s.file.size) if s.large else small[s.file.path] for s in files]
        blob, *oids = self._git.blobs(texts)
        tree = None
        if small is not None:
            modes = ("100755" if stored.file.executable else "100644" for stored in files)
            pairs = zip(files, oids, modes, strict=True)
            tree = self._git.tree({s.file.path: TreeEntry("", oid, mode) for s, oid, mode in pairs})  # type: ignore[arg-type]
        return Content(identifier, kind, tuple(files), dict(facts), blob, tree)

    def _remember(self, content: Content) -> Content:
        """Make a content findable; a later store of the same content renews its date."""
        root = self._git.tree(content.entries)
        commit = self._git.commit(root, (), f"content {content.content_id}\n", self._clock.now())
        with self._locks.moving() as fd:
            self._git.move([RefUpdate(PREFIX + hex_of(content.content_id), commit, None)], fd)
        with self._mutex:
            self._cache[content.content_id] = content
        return content

    def adopt(self, commit: str) -> Content:
        """Make the content inside a fetched release findable here. Its description is re-derived, never believed."""
        description, tree = self._git.read([f"{commit}:content.json", f"{commit}:artifact"])
        if description is None:
            raise StorageError(f"commit {commit[:12]} holds no content.json", why="it is no release")
        content = _parse(description[0], description[1], tree[0] if tree else None)
        if content.kind != "base" and content_id(content.kind, content.artifact.files) != content.content_id:
            raise StorageError(f"commit {commit[:12]} names a wrong content id", why="the content does not match its digest")
        known = self._git.ref(PREFIX + hex_of(content.content_id)) is not None
        return content if known else self._remember(content)

    def load(self, identifier: ContentId) -> Content:
        """What is known of a content; `NotRestorable` when the store has never heard of it or has dropped it."""
        with self._mutex:
            cached = self._cache.get(identifier)
        if cached is not None:
            return cached
        commit = self._git.ref(PREFIX + hex_of(identifier))
        if commit is None:
            raise NotRestorable(f"content {identifier} is not in the store", hint="store the artifact again")
        description, tree = self._git.read([f"{commit}:content.json", f"{commit}:artifact"])
        if description is None:
            raise StorageError(f"content {identifier} has no description", hint="run `reef release verify`")
        content = _parse(description[0], description[1], tree[0] if tree else None)
        with self._mutex:
            self._cache[identifier] = content
        return content

    def forget(self, identifier: ContentId) -> None:
        """Drop a content from memory, after the collector removed it."""
        with self._mutex:
            self._cache.pop(identifier, None)

    def require(self, identifier: ContentId) -> Content:
        """A content whose every byte is there; `NotRestorable` else. Asks the disk, since another process may collect."""
        if self._git.ref(PREFIX + hex_of(identifier)) is None:
            self.forget(identifier)
        content = self.load(identifier)
        missing = [oid for oid, size in content.large if not self._objects.has(oid, size)]
        if missing:
            raise NotRestorable(
                f"content {identifier} has lost {len(missing)} of its files",
                why="the garbage collector dropped them, or they were never fetched",
                hint="fetch them from the remote, or publish the artifact again",
            )
        return content

    def read_small(self, content: Content, paths: Sequence[str]) -> list[bytes]:
        """The bytes of files that live in git."""
        found = self._git.read([f"{content.tree}:{check_path(path)}" for path in paths])
        if any(entry is None for entry in found):
            raise StorageError(f"content {content.content_id} misses a file in git", hint="run `reef release verify`")
        return [entry[1] for entry in found if entry is not None]

    def policy(self, identifier: ContentId) -> Policy:
        """The routing policy of that content."""
        return read_policy(self.read_small(self.load(identifier), [POLICY_FILE])[0])

    def directory(self, identifier: ContentId) -> Path | None:
        """A read-only folder with the content's files, made on first use; None for a base model."""
        content = self.load(identifier)
        if content.kind == "base":
            return None
        target = self.folder(identifier)
        if target.is_dir():
            with suppress(OSError):
                os.utime(target)  # in use: compaction leaves it alone for a while
            return target
        with self._locks.writing(), storage_errors("materialising the artifact"):
            content = self.require(identifier)
            self._artifacts.mkdir(parents=True, exist_ok=True, mode=0o700)
            temporary = self._artifacts / f".tmp-{os.getpid()}-{os.urandom(6).hex()}"
            try:
                self._materialise(content, temporary)
                _move_folder(temporary, target)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
        return target

    def folder(self, identifier: ContentId) -> Path:
        """Where a content is, or would be, materialised."""
        return self._artifacts / hex_of(identifier)

    def _materialise(self, content: Content, folder: Path) -> None:
        folder.mkdir(mode=0o700)
        small = [stored.file for stored in content.files if not stored.large]
        for file, data in zip(small, self.read_small(content, [file.path for file in small]), strict=True):
            if hashlib.sha256(data).hexdigest() != file.sha256:
                raise StorageError(f"{file.path} of {content.content_id} is damaged", hint="run `reef release verify`")
            _write_file(_place(folder, file.path), 0o555 if file.executable else 0o444, partial(Path.write_bytes, data=data))
        for stored in content.files:
            if stored.large:
                self._link(stored.file, _place(folder, stored.file.path))

    def _link(self, file: ArtifactFile, target: Path) -> None:
        """The object itself, or a copy for an executable: the mode belongs to the inode."""
        if not file.executable:
            self._objects.link(file.sha256, target)
            target.chmod(0o444)
            return
        with self._objects.open(file.sha256) as source, target.open("xb") as out:
            shutil.copyfileobj(source, out)
        target.chmod(0o555)


def _place(folder: Path, path: str) -> Path:
    target = folder / check_path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


def _write_file(target: Path, mode: int, write: Callable[[Path], object]) -> None:
    write(target)
    target.chmod(mode)


def _move_folder(source: Path, target: Path) -> None:
    try:
        source.rename(target)
    except OSError:
        # Another process or thread made the same folder first; contents never change, so theirs is as good.
        if not target.is_dir():
            raise
    else:
        fsync_folder(target.parent)


def _parse(blob: str, data: bytes, tree: str | None) -> Content:
    raw = orjson.loads(data)
    files = tuple(
        StoredFile(ArtifactFile(check_path(f["path"]), f["size"], f["sha256"], f["executable"]), f["large"])
        for f in raw["files"]
    )
    return Content(ContentId(raw["content_id"]), as_kind(raw["kind"]), files, raw["about"], blob, tree)


def attributes(paths: Sequence[str]) -> bytes:
    """`.gitattributes` naming exactly the pointers, so that git-lfs checks out what Reef stored."""
    return "".join(f"{_pattern(f'artifact/{path}')} filter=lfs diff=lfs merge=lfs -text\n" for path in paths).encode()


def _pattern(path: str) -> str:
    escaped = "".join(f"\\{char}" if char in "*?[]" else char for char in path)
    return f'"{escaped}"'.replace("\\", "\\\\") if " " in escaped or '"' in escaped else escaped
