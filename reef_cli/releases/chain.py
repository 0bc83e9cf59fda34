"""The chains: reading one from its commits, appending to one by compare-and-swap.

`refs/reef/<scenario>/head` is the newest commit, its first parents are the chain; `refs/reef/<scenario>/held/<release_id>` are
candidates that wait for a person. A promoted one becomes the second parent of its promotion, so that its evidence stays in the
history. Weights and harness are released in this one chain, so that each release has its place in time; a surface's head is its
newest release there. Routing policies have a chain and a head of their own, `refs/reef/<scenario>/routing/head`: a policy
stands beside the release at the head, it does not replace it. Manifests are cached by commit id and never expire; every read
looks at the refs anew and so sees other processes.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from reef_cli.core import surfaces
from reef_cli.core.errors import HeadMoved, InvalidScenario, ReleaseNotFound, StorageError
from reef_cli.core.ids import valid_scenario
from reef_cli.core.types import Operation, Release, Surface
from reef_cli.releases.git import ZERO, Git, Link, RefMoved, RefUpdate, TreeEntry
from reef_cli.releases.lock import Locks
from reef_cli.releases.manifest import Entry, decode
from reef_cli.releases.objects import ObjectStore

ROOT = "refs/reef/"
ARCHIVE = "refs/reef-archive/"


@dataclass(frozen=True, slots=True)
class Chain:
    """A snapshot of one chain: `entries` newest first, `held` by release id. `surface` routing is the chain of policies."""

    scenario: str
    entries: tuple[Entry, ...]
    held: Mapping[str, Entry]
    surface: Surface = Surface.WEIGHTS

    @property
    def tip(self) -> Release | None:
        """The newest release, of whatever surface."""
        return self.entries[0].release if self.entries else None

    @property
    def releases(self) -> list[Release]:
        """Newest first, held ones left out."""
        return [entry.release for entry in self.entries]

    def head(self, surface: Surface) -> Release | None:
        """The release at a surface's head."""
        return self.tip if self.surface is Surface.ROUTING else surfaces.head(self.releases, surface)

    def find(self, release_id: str) -> Entry | None:
        """The release of that id in the chain, held ones left out."""
        return next((entry for entry in self.entries if entry.release.release_id == release_id), None)

    def standing(self, release_id: str) -> Entry | None:
        """What a routing policy means by an id: a release of the chain, a held one, or what a held one was promoted to."""
        if (entry := self.find(release_id) or self.held.get(release_id)) is not None:
            return entry
        promoted = self.promotion_of(release_id)
        return self.find(promoted.release_id) if promoted else None

    def promotion_of(self, release_id: str) -> Release | None:
        """The release by which a held one was promoted."""
        promoted = (e.release for e in self.entries if e.release.operation is Operation.PROMOTE)
        return next((release for release in promoted if release.source_release_id == release_id), None)


def head_ref(scenario: str, surface: Surface = Surface.WEIGHTS) -> str:
    """The ref of a chain's newest commit. Weights and harness share the main chain."""
    return f"{ROOT}{checked(scenario)}/{'routing/' if surface is Surface.ROUTING else ''}head"


def held_ref(scenario: str, release_id: str) -> str:
    return f"{ROOT}{checked(scenario)}/held/{release_id}"


def checked(scenario: str) -> str:
    """The name, when it is safe as a ref."""
    if not valid_scenario(scenario):
        raise InvalidScenario(f"{scenario!r} is no scenario name", hint="1 to 64 of letters, digits, `.`, `_`, `-`")
    return scenario


class Chains:
    """Reads and writes the chains of one repository."""

    def __init__(self, git: Git, locks: Locks, objects: ObjectStore) -> None:
        self._git = git
        self._locks = locks
        self._objects = objects
        self._entries: dict[str, Entry] = {}
        self._chains: dict[str, tuple[str, tuple[Entry, ...]]] = {}
        self._mutex = threading.Lock()

    def scenarios(self) -> list[str]:
        """Scenarios that have a chain."""
        names = (ref.removeprefix(ROOT) for ref in self._git.refs(ROOT))
        return sorted({scenario for scenario, _, rest in (name.partition("/") for name in names) if rest == "head"})

    def read(self, scenario: str, surface: Surface = Surface.WEIGHTS) -> Chain:
        """The chain as the refs say it is now; empty when the scenario has none."""
        entries = self._walk(head_ref(scenario, surface))
        if surface is Surface.ROUTING:
            return Chain(scenario, entries, MappingProxyType({}), surface)
        refs = self._git.refs(f"{ROOT}{scenario}/held/")
        held = {entry.release.release_id: entry for entry in self.load(list(refs.values()))}
        # A crash between the two ref writes of a promotion leaves the held ref behind; the chain tells the truth.
        promoted = {e.release.source_release_id for e in entries if e.release.operation is Operation.PROMOTE} if held else set()
        return Chain(scenario, entries, MappingProxyType({name: held[name] for name in held if name not in promoted}))

    def require(self, scenario: str) -> Chain:
        """The chain, or `ReleaseNotFound` when the scenario has none."""
        chain = self.read(scenario)
        if not chain.entries:
            raise ReleaseNotFound(f"scenario {scenario!r} has no releases yet", hint="it gets its first with its first request")
        return chain

    def head(self, scenario: str, surface: Surface = Surface.WEIGHTS) -> Entry | None:
        """Only the entry at a surface's head: one file read when the cache is warm."""
        chain = Chain(scenario, self._walk(head_ref(scenario, surface)), MappingProxyType({}), surface)
        head = chain.head(surface)
        return chain.find(head.release_id) if head else None

    def _walk(self, ref: str) -> tuple[Entry, ...]:
        head = self._git.ref(ref)
        if head is None:
            return ()
        with self._mutex:
            known = self._chains.get(ref)
        if known is not None and known[0] == head:
            return known[1]
        links = self._git.first_parents(head, known[0] if known else None)
        older = known[1] if known and links and links[-1].parent == known[0] else ()
        if known and not older:
            links = self._git.first_parents(head)
        entries = _by_surface(self._load(links), older)
        with self._mutex:
            self._chains[ref] = (head, entries)
        return entries

    def load(self, commits: Sequence[str]) -> list[Entry]:
        """The releases of these commits, in order; one process for those not seen before."""
        return self._load([Link(commit, None, None) for commit in commits])

    def _load(self, links: Sequence[Link]) -> list[Entry]:
        with self._mutex:
            missing = [link for link in links if link.commit not in self._entries]
        found = self._git.read([link.address for link in missing])
        for commit, blob in zip((link.commit for link in missing), found, strict=True):
            if blob is None:
                raise StorageError(f"commit {commit[:12]} holds no manifest", hint="run `reef release verify`")
            entry = decode(blob[1], commit)
            with self._mutex:
                self._entries[commit] = entry
        with self._mutex:
            return [self._entries[link.commit] for link in links]

    def restorable(self, entry: Entry) -> bool:
        return all(self._objects.has(oid, size) for oid, size in entry.large)

    def view(self, entry: Entry, *, pending: bool = False, known: dict[str, bool] | None = None) -> Release:
        """The release with what only the present state can tell. `known` carries answers per content through a listing."""
        release = entry.release
        restorable = known.get(release.content_id) if known is not None else None
        if restorable is None:
            restorable = self.restorable(entry)
            if known is not None:
                known[release.content_id] = restorable
        if pending == release.pending and restorable == release.restorable:
            return release
        return replace(release, pending=pending, restorable=restorable)

    def commit(self, entry: Entry, files: Mapping[str, TreeEntry], parents: Sequence[str], message: str) -> Entry:
        """Write the commit of a release (nothing refers to it yet)."""
        commit = self._git.commit(self._git.tree(files), parents, message, entry.release.recorded_at)
        made = Entry(replace(entry.release, commit=commit), entry.large)
        with self._mutex:
            self._entries[commit] = made
        return made

    def appended(self, chain: Chain, entry: Entry) -> None:
        """Spare the next reader of this process a git call after an own append."""
        with self._mutex:
            self._chains[head_ref(chain.scenario, chain.surface)] = (entry.release.commit, (entry, *chain.entries))

    def move(
        self, scenario: str, updates: Sequence[RefUpdate], expected: str | None, surface: Surface = Surface.WEIGHTS
    ) -> None:
        """Move refs, all or none; `HeadMoved` naming the present head when another publisher was first."""
        try:
            with self._locks.moving() as fd:
                self._git.move(updates, fd)
        except RefMoved:
            raise self.moved(scenario, expected, surface) from None

    def moved(self, scenario: str, expected: str | None, surface: Surface = Surface.WEIGHTS) -> HeadMoved:
        entry = self.head(scenario, surface)
        now = entry.release.release_id if entry else None
        return HeadMoved(
            f"head moved: {'' if surface is Surface.WEIGHTS else f'the {surface} of '}{scenario} is now at {now}",
            why=f"expected {expected}",
            hint="look at what was released meanwhile, then try again",
            head=now,
            expected=expected,
        )

    def archive(self, scenario: str, label: str) -> str | None:
        """Move a scenario's refs aside, so that its name starts with an empty chain; where they are now."""
        refs = self._git.refs(f"{ROOT}{checked(scenario)}/")
        if not refs:
            return None
        target = f"{ARCHIVE}{scenario}/{label}/"
        moves = [RefUpdate(target + name.removeprefix(f"{ROOT}{scenario}/"), oid, ZERO) for name, oid in refs.items()]
        self.move(scenario, [*moves, *(RefUpdate(name, ZERO, oid) for name, oid in refs.items())], None)
        with self._mutex:
            for surface in Surface:
                self._chains.pop(head_ref(scenario, surface), None)
        return target.rstrip("/")


def _by_surface(newer: Sequence[Entry], older: tuple[Entry, ...]) -> tuple[Entry, ...]:
    """The entries of a chain, each with the surface whose head it moved.

    Before a chain had a head per surface a harness was taken away by going back to the creation, written down as `weights`;
    what it took back tells.
    """
    known: dict[str, Surface] = {entry.release.release_id: entry.release.surface for entry in older}
    found: list[Entry] = []
    for entry in reversed(newer):
        release = entry.release
        emptied = release.operation is Operation.ROLLBACK and release.kind == "base" and release.surface is Surface.WEIGHTS
        if emptied and known.get(str(release.evidence.get("rolled_back_from"))) is Surface.HARNESS:
            release = replace(release, surface=Surface.HARNESS)
        known[release.release_id] = release.surface
        found.insert(0, Entry(release, entry.large))
    return (*found, *older)
