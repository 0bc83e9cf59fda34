"""Keeping full checkpoints small: all but the newest become differences to the one before them.

Whole stay the newest two contents of each chain, the last gated one, held candidates, and one in `PERIOD`, so that no restoring
walks far. Each delta is proven to give its bytes back before the whole goes. Encoding runs beside publishers; only the swap of
files takes the collector's lock. A checkpoint whose difference saves little stays whole. Git's own objects are packed here too
once many lie loose: a long chain is then listed in a third of the time.
"""

import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from reef_cli.core import surfaces
from reef_cli.core.clock import Clock
from reef_cli.core.errors import ReefError
from reef_cli.core.ids import ContentId
from reef_cli.core.types import Surface
from reef_cli.releases.chain import Chain, Chains
from reef_cli.releases.collect import pack
from reef_cli.releases.contents import Content, Contents
from reef_cli.releases.git import Git
from reef_cli.releases.lock import Locks
from reef_cli.releases.objects import ObjectStore

PERIOD = 8
NEWEST = 2
# A folder somebody asked for this lately may still be read by an engine that loads it.
IDLE_S = 600.0


@dataclass(frozen=True, slots=True)
class CompactReport:
    """What became a delta, the bytes that saved, and the folders of older checkpoints that were cleared."""

    objects: int = 0
    bytes: int = 0
    folders: int = 0
    seconds: float = 0.0


class Compactor:
    """Compacts one store. Remembers what saved too little, so that a server tries it once."""

    def __init__(self, git: Git, chains: Chains, contents: Contents, objects: ObjectStore, locks: Locks, clock: Clock) -> None:
        self._git = git
        self._chains = chains
        self._contents = contents
        self._objects = objects
        self._locks = locks
        self._clock = clock
        self._poor: set[tuple[str, str]] = set()

    def compact(self, *, idle_s: float = IDLE_S) -> CompactReport:
        started = time.perf_counter()
        done = saved = 0
        older: set[ContentId] = set()
        for chain in map(self._chains.read, self._chains.scenarios()):
            checkpoints = self._checkpoints(chain)
            whole = kept_whole(chain)
            for oid, base in self._plan(checkpoints, whole):
                bytes_saved = self._swap(oid, base)
                done, saved = done + (bytes_saved > 0), saved + bytes_saved
            older |= {content.content_id for content in checkpoints} - whole
        folders = self._clear(older - self._whole_anywhere(), idle_s)
        with self._locks.collecting():
            pack(self._git, self._locks)
        return CompactReport(done, saved, folders, round(time.perf_counter() - started, 3))

    def _checkpoints(self, chain: Chain) -> list[Content]:
        """The distinct checkpoints of a chain, oldest first."""
        seen = dict.fromkeys(e.release.content_id for e in reversed(chain.entries) if e.release.kind == "checkpoint")
        found = []
        for identifier in seen:
            try:
                found.append(self._contents.load(identifier))
            except ReefError:
                continue  # dropped: `verify` tells
        return found

    def _plan(self, checkpoints: Sequence[Content], whole: set[ContentId]) -> Iterator[tuple[str, str]]:
        """`(object, base)` of what may become a delta, oldest first, each against the checkpoint before it."""
        stay = {oid for content in checkpoints if content.content_id in whole for oid, _ in content.large}
        for before, content in pairwise(checkpoints):
            if content.content_id in whole:
                continue
            bases = {stored.file.path: stored.file for stored in before.files if stored.large}
            for stored in content.files:
                base, oid = bases.get(stored.file.path), stored.file.sha256
                fits = stored.large and base is not None and base.sha256 != oid and oid not in stay
                if fits and base is not None and self._may(oid, stored.file.size, base.sha256, base.size):
                    yield oid, base.sha256

    def _may(self, oid: str, size: int, base: str, base_size: int) -> bool:
        objects = self._objects
        if (oid, base) in self._poor or not objects.whole(oid, size) or not objects.has(base, base_size):
            return False
        return objects.depth(base) + 1 < PERIOD and oid not in objects.closure([base])

    def _swap(self, oid: str, base: str) -> int:
        with self._locks.writing():
            prepared = self._objects.prepare_delta(oid, base)
        if prepared is None:
            self._poor.add((oid, base))
            return 0
        try:
            with self._locks.collecting():
                # The collector may have run in between, and taken the leftover or the base with it.
                whole = prepared.exists() and self._objects.path(oid).exists() and self._objects.digest_present(base)
                return self._objects.swap(oid, prepared) if whole else 0
        finally:
            prepared.unlink(missing_ok=True)

    def _whole_anywhere(self) -> set[ContentId]:
        return {identifier for name in self._chains.scenarios() for identifier in kept_whole(self._chains.read(name))}

    def _clear(self, contents: set[ContentId], idle_s: float) -> int:
        """Drop the folders of older checkpoints, whose links would keep the whole files on the disk."""
        cleared = 0
        with self._locks.collecting():
            for identifier in contents:
                folder = self._contents.folder(identifier)
                if folder.is_dir() and self._clock.now() - folder.stat().st_mtime >= idle_s:
                    shutil.rmtree(folder, ignore_errors=True)
                    cleared += 1
        return cleared


def kept_whole(chain: Chain) -> set[ContentId]:
    """Contents of a chain that stay whole: they are served, or soon may be."""
    weights = surfaces.lane(chain.releases, Surface.WEIGHTS)
    order = list(dict.fromkeys(release.content_id for release in weights))
    gated = [release.content_id for release in weights if release.gated][:1]
    held = {entry.release.content_id for entry in chain.held.values()}
    return {*order[:NEWEST], *gated, *held}
