"""Garbage collection: what nobody can need any more, and never a byte of anything restorable.

Kept: every content of every chain (or what the keep policy names of it), every held candidate, every archived chain, all
routing policies with what the one in force names, and whatever was stored less than the grace period ago and is not published
yet. Runs alone: writers hold the lock shared, the collector exclusively, so leftovers of dead processes may go as well.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from reef_cli.core import surfaces
from reef_cli.core.clock import Clock
from reef_cli.core.ids import ContentId
from reef_cli.core.types import Surface
from reef_cli.releases.chain import ARCHIVE, Chain, Chains
from reef_cli.releases.contents import PREFIX, Contents
from reef_cli.releases.git import ZERO, Git, RefUpdate
from reef_cli.releases.lock import Locks
from reef_cli.releases.objects import ObjectStore

# Loose objects make every read a file; beyond this many a collection packs them.
PACK_ABOVE = 2000


@dataclass(frozen=True, slots=True)
class Keep:
    """The restorable set of each chain. `latest` None: everything.

    Else, of each surface: the newest `latest` distinct contents, plus every gated one when `gated`, the head, and the content a
    rollback would go to. Contents not stored by anyone's chain are kept for `grace_s` seconds after they were stored.
    """

    latest: int | None = None
    gated: bool = True
    grace_s: float = 24 * 3600.0
    pinned: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class GcReport:
    """What was (or, dry, would be) removed. `releases` are those that stop being restorable, as `(scenario, id)`."""

    dry_run: bool
    contents: tuple[ContentId, ...] = ()
    objects: int = 0
    bytes: int = 0
    kept_objects: int = 0
    releases: tuple[tuple[str, str], ...] = ()
    leftovers: int = 0


@dataclass(slots=True)
class _Plan:
    needed: set[str] = field(default_factory=set)
    folders: set[ContentId] = field(default_factory=set)
    drop_refs: dict[str, str] = field(default_factory=dict)
    drop_contents: set[ContentId] = field(default_factory=set)
    lost: list[tuple[str, str]] = field(default_factory=list)


def kept_of(chain: Chain, keep: Keep) -> set[ContentId]:
    """Contents of a chain that stay restorable under the policy."""
    releases = chain.releases
    held = {entry.release.content_id for entry in chain.held.values()}
    if keep.latest is None:
        return held | {release.content_id for release in releases}
    kept = held
    for surface in surfaces.heads(releases):
        lane = surfaces.lane(releases, surface)
        distinct = list(dict.fromkeys(release.content_id for release in lane))
        # The second is where a rollback goes by default.
        kept |= set(distinct[: max(2, keep.latest)])
    kept |= {release.content_id for release in releases if keep.gated and release.gated}
    return kept | {release.content_id for release in releases if release.release_id in keep.pinned}


def pack(git: Git, locks: Locks) -> bool:
    """Pack what lies loose when that is much; the caller holds the collector's lock. Whether it did."""
    if sum(1 for _ in git.repo.glob("objects/??/*")) <= PACK_ABOVE:
        return False
    git.run("repack", "-a", "-d", "-q")
    with locks.moving():
        git.run("pack-refs", "--all")
    return True


class Collector:
    """Collects one store."""

    def __init__(self, git: Git, chains: Chains, contents: Contents, objects: ObjectStore, locks: Locks, clock: Clock) -> None:
        self._git = git
        self._chains = chains
        self._contents = contents
        self._objects = objects
        self._locks = locks
        self._clock = clock

    def collect(self, keep: Keep, *, dry_run: bool) -> GcReport:
        with self._locks.collecting():
            plan = self._plan(keep)
            doomed = [(oid, size) for oid, size, _ in self._objects.all() if oid not in plan.needed]
            kept = sum(1 for _ in self._objects.all()) - len(doomed)
            leftovers = list(self._leftovers())
            if not dry_run:
                self._execute(plan, [oid for oid, _ in doomed], leftovers)
        size = sum(size for _, size in doomed)
        contents = tuple(sorted(plan.drop_contents))
        return GcReport(dry_run, contents, len(doomed), size, kept, tuple(plan.lost), len(leftovers))

    def _plan(self, keep: Keep) -> _Plan:
        plan = _Plan()
        chains = [self._chains.read(scenario) for scenario in self._chains.scenarios()]
        wanted: set[ContentId] = set(self._archived())
        named: set[ContentId] = set()
        for chain in chains:
            policies = self._chains.read(chain.scenario, Surface.ROUTING)
            routed = {entry.release.content_id for entry in policies.entries}
            wanted |= kept_of(chain, keep) | routed | self._served_by(policies, chain)
            named |= routed | {entry.release.content_id for entry in (*chain.entries, *chain.held.values())}
        stored = self._stored()
        now = self._clock.now()
        wanted |= {cid for cid, (_, at) in stored.items() if cid not in named and now - at < keep.grace_s}
        for identifier, (commit, _) in stored.items():
            if identifier in wanted:
                plan.needed |= {oid for oid, _ in self._contents.load(identifier).large}
            elif identifier not in named:
                plan.drop_refs[PREFIX + identifier.partition(":")[2]] = commit
        # What a kept object is made from is needed like the object itself.
        plan.needed = self._objects.closure(plan.needed)
        plan.drop_contents = {
            cid for cid in stored if cid not in wanted and (cid not in named or self._contents.load(cid).large)
        }
        plan.lost = self._lost(chains, plan.needed)
        return plan

    def _served_by(self, policies: Chain, chain: Chain) -> set[ContentId]:
        """Contents of the releases that the routing policy in force names."""
        if policies.tip is None:
            return set()
        names = self._contents.policy(policies.tip.content_id).named
        return {entry.release.content_id for name in names if (entry := chain.standing(name)) is not None}

    def _lost(self, chains: Sequence[Chain], needed: set[str]) -> list[tuple[str, str]]:
        return [
            (chain.scenario, entry.release.release_id)
            for chain in chains
            for entry in chain.entries
            if self._chains.restorable(entry) and any(oid not in needed for oid, _ in entry.large)
        ]

    def _stored(self) -> Mapping[ContentId, tuple[str, float]]:
        """Every content with its commit and the time it was last stored."""
        rows = self._git.run("for-each-ref", "--format=%(refname) %(objectname) %(committerdate:unix)", PREFIX).decode()
        fields = (row.split(" ") for row in rows.splitlines())
        return {ContentId(f"sha256:{name.removeprefix(PREFIX)}"): (commit, float(at)) for name, commit, at in fields}

    def _archived(self) -> Iterator[ContentId]:
        """Contents of archived chains, which stay whole."""
        for tip in set(self._git.refs(ARCHIVE).values()):
            for entry in self._chains.load([link.commit for link in self._git.first_parents(tip)]):
                yield entry.release.content_id

    def _leftovers(self) -> Iterator[Path]:
        """Temporary files and folders of processes that died; nobody writes while the lock is held."""
        yield from self._objects.temporary.glob("*")
        yield from (self._git.repo / "reef-tmp").glob("*")
        yield from self._git.repo.parent.glob("artifacts/.tmp-*")

    def _execute(self, plan: _Plan, objects: Sequence[str], leftovers: Sequence[Path]) -> None:
        """In this order a crash leaves nothing that looks whole and is not: a lost object only makes a content unrestorable."""
        with self._locks.moving() as fd:
            if plan.drop_refs:
                self._git.move([RefUpdate(name, ZERO, oid) for name, oid in plan.drop_refs.items()], fd)
        for identifier in plan.drop_contents:
            shutil.rmtree(self._contents.folder(identifier), ignore_errors=True)
            self._contents.forget(identifier)
        for oid in objects:
            self._objects.remove(oid)
        for path in leftovers:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        self._git.run("prune", "--expire=now")
        pack(self._git, self._locks)
