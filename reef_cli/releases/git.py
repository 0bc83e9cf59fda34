"""Git plumbing in one place: blobs, trees, commits, refs, batch reads, over one bare repository.

Promises: every call runs in a closed environment (no user or system configuration, no hooks, no `GIT_*` of the caller, a
fixed author without machine names), objects and refs are fsynced, and refs move only by compare-and-swap. Plain processes
instead of GitPython: a call costs about 2 ms, importing GitPython alone 160 ms, and its command layer cannot take variables out
of the caller's environment. Refs are read from their files, which costs microseconds and also sees other processes' writes.
Does not know what a release is.
"""

import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from reef_cli.core.errors import MissingDependency, StorageError

ZERO = "0" * 40
IDENTITY = {"NAME": "Reef", "EMAIL": "reef@reef.invalid"}
FSYNC = ("-c", "core.fsync=committed,objects,reference", "-c", "core.fsyncMethod=fsync")
# A ref lock older than this belongs to a process that died: an update holds it for milliseconds.
STALE_LOCK_S = 2.0
_SETTINGS = (
    *FSYNC,
    *("-c", "core.hooksPath=/dev/null", "-c", "gc.auto=0", "-c", "core.logAllRefUpdates=false"),
    *("-c", "core.filesRefLockTimeout=3000", "-c", "core.packedRefsTimeout=3000"),
)


class GitError(StorageError):
    """Git failed; the message carries its last line."""


class RefMoved(Exception):
    """A compare-and-swap found another value. Internal: callers turn it into `HeadMoved`."""


@dataclass(frozen=True, slots=True)
class TreeEntry:
    """One line of a tree object."""

    name: str
    oid: str
    mode: Literal["100644", "100755", "040000"] = "100644"

    def line(self) -> bytes:
        kind = "tree" if self.mode == "040000" else "blob"
        return f"{self.mode} {kind} {self.oid}\t{self.name}".encode() + b"\0"


@dataclass(frozen=True, slots=True)
class RefUpdate:
    """Move `name` from `old` (ZERO: must not exist) to `new` (ZERO: delete). `old` None skips the comparison."""

    name: str
    new: str
    old: str | None

    def line(self) -> str:
        if self.new == ZERO:
            return f"delete {self.name} {self.old or ''}".rstrip()
        return f"update {self.name} {self.new} {self.old or ''}".rstrip()


@dataclass(frozen=True, slots=True)
class Link:
    """A commit of a chain: its first parent, and the blob its message names as the manifest.

    The trailer saves looking through commit and tree for each of a thousand releases (60 ms to 15 ms); `verify` compares it.
    """

    commit: str
    parent: str | None
    manifest: str | None

    @property
    def address(self) -> str:
        return self.manifest or f"{self.commit}:manifest.json"


def closed_environment(repo: Path) -> dict[str, str]:
    """An environment in which git sees nothing but `repo`."""
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": str(repo),
        "LC_ALL": "C",
        "GIT_DIR": str(repo),
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_TERMINAL_PROMPT": "0",
        **{f"GIT_{role}_{key}": value for role in ("AUTHOR", "COMMITTER") for key, value in IDENTITY.items()},
    }


class Git:
    """The plumbing of one bare repository."""

    def __init__(self, repo: Path) -> None:
        self.repo = repo
        self._environment = closed_environment(repo)
        self._staging = repo / "reef-tmp"

    def ensure(self) -> None:
        """Make the repository when it is not there; safe when several processes do so at once."""
        if not (self.repo / "HEAD").exists():
            self.repo.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.repo.mkdir(exist_ok=True, mode=0o700)
            self.run("init", "--quiet", "--bare", "--template=", "--initial-branch=main", str(self.repo))
        self._staging.mkdir(exist_ok=True, mode=0o700)

    def run(self, *arguments: str, stdin: bytes = b"", environment: Mapping[str, str] | None = None) -> bytes:
        """Standard output of one git command; `GitError` when it fails."""
        done = self._spawn(arguments, stdin, environment)
        if done.returncode != 0:
            raise _failure(arguments[0], done)
        return done.stdout

    def _spawn(
        self, arguments: Sequence[str], stdin: bytes, environment: Mapping[str, str] | None = None, fds: Sequence[int] = ()
    ) -> "subprocess.CompletedProcess[bytes]":
        try:
            return subprocess.run(
                ["git", *_SETTINGS, *arguments],
                input=stdin,
                capture_output=True,
                env={**self._environment, **(environment or {})},
                pass_fds=fds,
                check=False,
            )
        except FileNotFoundError as error:
            raise _no_git() from error

    def blobs(self, contents: Sequence[bytes]) -> list[str]:
        """Object ids of `contents`, written and fsynced, in order; one process for all."""
        if not contents:
            return []
        with self._staged(contents) as paths:
            listing = "".join(f"{path}\n" for path in paths).encode()
            return self.run("hash-object", "-w", "--no-filters", "--stdin-paths", stdin=listing).decode().split()

    @contextmanager
    def _staged(self, contents: Sequence[bytes]) -> Iterator[list[Path]]:
        folder = self._staging / f"{os.getpid()}-{os.urandom(6).hex()}"
        folder.mkdir(mode=0o700, parents=True)
        try:
            paths = [folder / str(index) for index in range(len(contents))]
            for path, data in zip(paths, contents, strict=True):
                path.write_bytes(data)
            yield paths
        finally:
            for path in folder.iterdir():
                path.unlink()
            folder.rmdir()

    def tree(self, files: Mapping[str, TreeEntry]) -> str:
        """The tree object of `files` (POSIX path -> entry, the entry's own name is ignored), directories included.

        One process for any depth: `mktree --batch` answers each directory, deepest first, before its parent is written.
        """
        folders: dict[str, list[TreeEntry]] = {"": []}
        for path, entry in files.items():
            folder, _, name = path.rpartition("/")
            folders.setdefault(folder, []).append(TreeEntry(name, entry.oid, entry.mode))
            while folder:
                folder = folder.rpartition("/")[0]
                folders.setdefault(folder, [])
        return self._write_trees(folders)

    def _write_trees(self, folders: dict[str, list[TreeEntry]]) -> str:
        environment = dict(self._environment)
        command = ["git", *_SETTINGS, "mktree", "-z", "--batch"]
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
            )
        except FileNotFoundError as error:
            raise _no_git() from error
        with process:
            assert process.stdin is not None and process.stdout is not None and process.stderr is not None
            oid = ""
            for folder in sorted(folders, key=lambda name: (-_depth(name), name)):
                with suppress(BrokenPipeError):
                    process.stdin.write(b"".join(entry.line() for entry in folders[folder]) + b"\0")
                    process.stdin.flush()
                oid = process.stdout.readline().decode().strip()
                if not oid:
                    raise GitError("git mktree failed", why=process.stderr.read().decode(errors="replace").strip()[-500:])
                if folder:
                    parent, _, name = folder.rpartition("/")
                    folders[parent].append(TreeEntry(name, oid, "040000"))
            process.stdin.close()
        return oid

    def commit(self, tree: str, parents: Sequence[str], message: str, at: float) -> str:
        """A commit object dated `at` (Unix seconds, UTC)."""
        date = f"{int(at)} +0000"
        arguments = [part for parent in parents for part in ("-p", parent)]
        environment = {"GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date}
        return self.run("commit-tree", tree, *arguments, stdin=message.encode(), environment=environment).decode().strip()

    def move(self, updates: Sequence[RefUpdate], lock_fd: int) -> None:
        """All updates or none. `RefMoved` when a ref has not its expected value.

        `lock_fd` is handed to git, so that the caller's lock outlives a killed caller until git is done too.
        """
        for attempt in range(2):
            self._clear_stale_locks(updates)
            text = "start\n" + "".join(f"{update.line()}\n" for update in updates) + "prepare\ncommit\n"
            done = self._spawn(["update-ref", "--stdin"], text.encode(), fds=(lock_fd,))
            if done.returncode == 0:
                return
            if any(update.old is not None and self.ref(update.name) != _none(update.old) for update in updates):
                raise RefMoved
            if attempt or b".lock" not in done.stderr:
                raise _failure("update-ref", done)

    def _clear_stale_locks(self, updates: Sequence[RefUpdate]) -> None:
        for name in ("packed-refs", *(update.name for update in updates)):
            lock = self.repo / f"{name}.lock"
            with suppress(FileNotFoundError):
                if time.time() - lock.stat().st_mtime > STALE_LOCK_S:
                    lock.unlink()

    def ref(self, name: str) -> str | None:
        """The object a ref points to, or None. A loose file wins; git packs a ref before it drops the file."""
        with suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return (self.repo / name).read_text().strip() or None
        return self._packed().get(name)

    def refs(self, prefix: str) -> dict[str, str]:
        """Every ref below `prefix` (which ends in `/`), by full name."""
        loose: dict[str, str] = {}
        for folder, _, names in os.walk(self.repo / prefix):
            for name in names:
                path = Path(folder, name)
                if not name.endswith(".lock"):
                    with suppress(FileNotFoundError):
                        loose[path.relative_to(self.repo).as_posix()] = path.read_text().strip()
        packed = {name: oid for name, oid in self._packed().items() if name.startswith(prefix)}
        return {**packed, **{name: oid for name, oid in loose.items() if oid}}

    def _packed(self) -> dict[str, str]:
        try:
            text = (self.repo / "packed-refs").read_text()
        except FileNotFoundError:
            return {}
        pairs = (line.split(" ", 1) for line in text.splitlines() if line and line[0] not in "#^")
        return {name: oid for oid, name in pairs}

    def read(self, names: Sequence[str]) -> list[tuple[str, bytes] | None]:
        """`(oid, bytes)` of each object name (any revision syntax), None for what does not exist; one process for all."""
        if not names:
            return []
        output = self.run("cat-file", "--batch", stdin="".join(f"{name}\n" for name in names).encode())
        found: list[tuple[str, bytes] | None] = []
        position = 0
        for _ in names:
            end = output.index(b"\n", position)
            head = output[position:end].split(b" ")
            position = end + 1
            if head[-1] in (b"missing", b"ambiguous"):
                found.append(None)
                continue
            size = int(head[2])
            found.append((head[0].decode(), output[position : position + size]))
            position += size + 1
        return found

    def first_parents(self, head: str, stop: str | None = None) -> list[Link]:
        """The chain from `head` back to the root, or to just after `stop` when that is on the way."""
        layout = "--format=%H %P%x09%(trailers:key=Manifest,valueonly,separator=%x20)"
        rows = self.run("log", "--first-parent", layout, head, *([f"^{stop}"] if stop else [])).decode().splitlines()
        return [_link(row) for row in rows]


def _link(row: str) -> Link:
    commits, _, manifest = row.partition("\t")
    commit, _, parents = commits.partition(" ")
    return Link(commit, parents.split(" ")[0] or None, manifest.strip() or None)


def _depth(folder: str) -> int:
    return folder.count("/") + 1 if folder else 0


def _none(oid: str) -> str | None:
    return None if oid == ZERO else oid


def _no_git() -> MissingDependency:
    return MissingDependency(
        "git is not installed", why="releases are kept in a git repository", hint="install git 2.36 or newer"
    )


def _failure(command: str, done: "subprocess.CompletedProcess[bytes]") -> GitError:
    lines = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit status {done.returncode}"]
    return GitError(f"git {command} failed: {lines[-1][:300]}", hint="check free space and rights of the releases folder")
