"""Chains on a remote git server: push and fetch, bytes before refs, fast-forward only.

Large files travel by `git-lfs` where it is installed and the remote is a server; between folders Reef copies them itself and
re-hashes every byte. The remote side runs with the person's own git configuration (credentials, proxies), but without hooks
and without the caller's `GIT_*` variables. A remote chain that is no ancestor of the local one is a conflict, never a merge.
"""

import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from reef_cli.core.errors import ConflictError, MissingDependency, StorageError, UnavailableError
from reef_cli.core.ids import valid_scenario
from reef_cli.core.types import Surface
from reef_cli.releases.chain import ROOT, Chains, head_ref
from reef_cli.releases.contents import Contents, storage_errors
from reef_cli.releases.git import FSYNC, ZERO, Git, RefMoved, RefUpdate
from reef_cli.releases.lock import Locks
from reef_cli.releases.manifest import Entry
from reef_cli.releases.objects import ObjectStore

INCOMING = "refs/reef-incoming/"
_KEPT_VARIABLES = ("GIT_SSH", "GIT_SSH_COMMAND", "GIT_ASKPASS", "GIT_SSL_CAINFO", "GIT_SSL_NO_VERIFY")
_TIMEOUT_S = 3600.0


@dataclass(frozen=True, slots=True)
class Transfer:
    """What a push or fetch did. `scenarios` are those whose chain now agrees with the other side."""

    remote: str
    scenarios: tuple[str, ...] = field(default=())
    objects: int = 0
    bytes: int = 0


class Remote:
    """Push and fetch of one store."""

    def __init__(self, git: Git, chains: Chains, contents: Contents, objects: ObjectStore, locks: Locks, lfs: str) -> None:
        self._git = git
        self._chains = chains
        self._contents = contents
        self._objects = objects
        self._locks = locks
        self._lfs = lfs

    def push(self, remote: str, scenarios: Sequence[str] | None) -> Transfer:
        """Objects first, then all refs of each chain in one atomic update. `ConflictError` when the remote is ahead."""
        names = list(scenarios) if scenarios is not None else self._chains.scenarios()
        if not names:
            return Transfer(remote)
        wanted = self._large(names)
        present = [(oid, size) for oid, size in wanted if self._objects.has(oid, size)]
        with storage_errors("pushing large files"):
            moved = self._send(remote, present)
        refs = [f"{ROOT}{name}/*:{ROOT}{name}/*" for name in names]
        self._talk("push", "--quiet", "--atomic", "--no-verify", _address(remote), *refs)
        return Transfer(remote, tuple(names), len(moved), sum(size for _, size in moved))

    def fetch(self, remote: str, scenarios: Sequence[str] | None) -> Transfer:
        """Commits, then objects, then the local refs by compare-and-swap."""
        specs = [f"+{ROOT}{name}/*:{INCOMING}{name}/*" for name in scenarios or ["*"]]
        if scenarios is None:
            specs = [f"+{ROOT}*:{INCOMING}*"]
        with self._locks.writing(), storage_errors("fetching a chain"):
            self._talk("fetch", "--quiet", "--no-tags", "--no-write-fetch-head", _address(remote), *specs)
            incoming = self._git.refs(INCOMING)
            try:
                return self._accept(remote, {name.removeprefix(INCOMING): oid for name, oid in incoming.items()})
            finally:
                with self._locks.moving() as fd, suppress(RefMoved):
                    self._git.move([RefUpdate(name, ZERO, oid) for name, oid in incoming.items()], fd)

    def _accept(self, remote: str, incoming: dict[str, str]) -> Transfer:
        names = sorted({name.partition("/")[0] for name in incoming if name.endswith("/head")})
        for name in names:
            if not valid_scenario(name):
                raise StorageError(f"the remote names a chain {name!r}", why="that is no scenario name")
            for surface in (Surface.WEIGHTS, Surface.ROUTING):
                ref = head_ref(name, surface)
                if (theirs := incoming.get(ref.removeprefix(ROOT))) is not None:
                    self._check_forward(name, ref, theirs)
        entries = self._entries(incoming)
        needed = dict.fromkeys(pair for entry in entries for pair in entry.large)
        moved = self._receive(remote, [(oid, size) for oid, size in needed if not self._objects.has(oid, size)])
        for entry in entries:
            self._contents.adopt(entry.release.commit)
        for name in names:
            self._advance(name, incoming)
        return Transfer(remote, tuple(names), len(moved), sum(size for _, size in moved))

    def _check_forward(self, scenario: str, ref: str, theirs: str) -> None:
        ours = self._git.ref(ref)
        if ours and ours != theirs and not self._ancestor(ours, theirs) and not self._ancestor(theirs, ours):
            raise ConflictError(
                f"the chain of {scenario} differs from the remote's",
                why="both have releases the other has not",
                hint="archive one of them and fetch again",
            )

    def _ancestor(self, older: str, newer: str) -> bool:
        return self._git.run("merge-base", older, newer).decode().strip() == older if self._related(older, newer) else False

    def _related(self, a: str, b: str) -> bool:
        roots = [self._git.first_parents(commit)[-1].commit for commit in (a, b)]
        return roots[0] == roots[1]

    def _entries(self, incoming: dict[str, str]) -> list[Entry]:
        found: dict[str, Entry] = {}
        for name, tip in incoming.items():
            commits = [link.commit for link in self._git.first_parents(tip)] if name.endswith("/head") else [tip]
            for entry in self._chains.load([commit for commit in commits if commit not in found]):
                found[entry.release.commit] = entry
        return list(found.values())

    def _advance(self, scenario: str, incoming: dict[str, str]) -> None:
        updates = []
        for name, theirs in incoming.items():
            if name.partition("/")[0] != scenario:
                continue
            ours = self._git.ref(ROOT + name)
            newer = ours is None or (name.endswith("/head") and ours != theirs and self._ancestor(ours, theirs))
            if newer:
                updates.append(RefUpdate(ROOT + name, theirs, ours or ZERO))
        if updates:
            self._chains.move(scenario, updates, None)

    def _large(self, names: Iterable[str]) -> list[tuple[str, int]]:
        found: dict[tuple[str, int], None] = {}
        for name in names:
            chain = self._chains.require(name)
            found |= dict.fromkeys(pair for entry in (*chain.entries, *chain.held.values()) for pair in entry.large)
        return list(found)

    def _send(self, remote: str, wanted: Sequence[tuple[str, int]]) -> Sequence[tuple[str, int]]:
        folder = local_repository(remote)
        if folder is not None:
            return _copy(self._objects, ObjectStore(folder), wanted)
        if wanted:
            self._require_lfs(remote)
            with self._objects.made_whole(oid for oid, _ in wanted):
                self._talk("lfs", "push", "--object-id", remote, *(oid for oid, _ in wanted))
        return wanted

    def _receive(self, remote: str, wanted: Sequence[tuple[str, int]]) -> Sequence[tuple[str, int]]:
        folder = local_repository(remote)
        if folder is not None:
            theirs = ObjectStore(folder)
            return _copy(theirs, self._objects, [(oid, size) for oid, size in wanted if theirs.has(oid, size)])
        if not wanted:
            return wanted
        self._require_lfs(remote)
        # Every release's files: without `--all`, git-lfs fetches those of the tips only.
        done = self._run("lfs", "fetch", "--all", remote, *self._git.refs(INCOMING))
        missing = [oid for oid, size in wanted if not self._objects.has(oid, size)]
        told = done.stderr.decode(errors="replace")
        if done.returncode != 0 and not (missing and all(f"[{oid}] Object does not exist" in told for oid in missing)):
            raise _refused("lfs", told)
        # What the remote has dropped stays unrestorable here too; the chain itself is whole.
        return [(oid, size) for oid, size in wanted if oid not in missing]

    def _require_lfs(self, remote: str) -> None:
        if self._lfs == "never" or shutil.which("git-lfs") is None:
            raise MissingDependency(
                f"git-lfs is needed to exchange large files with {_shown(remote)}",
                why="storage.lfs is `never`" if self._lfs == "never" else "the program is not installed",
                hint="install git-lfs, or use a folder as the remote",
            )

    def _talk(self, *arguments: str) -> bytes:
        done = self._run(*arguments)
        if done.returncode != 0:
            raise _refused(arguments[0], done.stderr.decode(errors="replace"))
        return done.stdout

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_") or key in _KEPT_VARIABLES}
        environment |= {
            "GIT_DIR": str(self._git.repo),
            "GIT_TERMINAL_PROMPT": "0",
            "GIT_ALLOW_PROTOCOL": "file:git:http:https:ssh",
        }
        command = ["git", *FSYNC, "-c", "core.hooksPath=/dev/null", *arguments]
        try:
            return subprocess.run(command, capture_output=True, env=environment, check=False, timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise UnavailableError(f"git {arguments[0]} did not end in {_TIMEOUT_S:.0f} s", hint="try again later") from error


def local_repository(remote: str) -> Path | None:
    """The git folder of a remote that is a folder of this machine, else None."""
    path = Path(unquote(urlsplit(remote).path)) if remote.startswith("file://") else Path(remote)
    if (path / "objects").is_dir():
        return path
    return path / ".git" if (path / ".git" / "objects").is_dir() else None


def _address(remote: str) -> str:
    if remote.startswith("-"):
        raise ConflictError(f"{remote!r} is no git remote")
    return remote


def _shown(remote: str) -> str:
    """The remote without a password in it."""
    parts = urlsplit(remote)
    return remote.replace(f"{parts.netloc}", parts.hostname or "", 1) if parts.password else remote


def _copy(source: ObjectStore, target: ObjectStore, wanted: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """Objects of `wanted` that `target` lacked, copied and re-hashed."""
    copied = []
    for oid, size in wanted:
        if target.has(oid, size):
            continue
        with source.open(oid) as file:
            staged = target.stage(file)
        try:
            if staged.oid != oid:
                raise StorageError(f"object {oid[:12]} is damaged at its source", hint="run `reef release verify` there")
            target.place(staged)
        finally:
            target.discard(staged)
        copied.append((oid, size))
    return copied


def _refused(command: str, stderr: str) -> ConflictError | UnavailableError:
    lines = stderr.strip().splitlines()
    if any(word in stderr for word in ("non-fast-forward", "fetch first", "[rejected]", "stale info")):
        return ConflictError("the remote's chain has moved on", why=lines[0][:300], hint="fetch first, then push again")
    return UnavailableError(
        f"git {command} failed", why=(lines or ["no message"])[-1][:300], hint="check the remote and try again"
    )
