"""`ReleaseService`: the releases of one home, for threads and processes alike.

A publication writes bytes, syncs them, writes a commit, and moves its surface's head by compare-and-swap; whoever loses gets
`HeadMoved` with the present head and has changed nothing. Publishers of different surfaces do not meet. All calls block (git,
fsync): the server runs them in threads. Does not know who decided, nor what serves.
"""

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from reef_cli.core import surfaces
from reef_cli.core.clock import Clock, SystemClock
from reef_cli.core.errors import (
    ConflictError,
    ContentConflict,
    HeadMoved,
    InvalidRequest,
    MissingDependency,
    NotPending,
    NotRestorable,
    ReleaseNotFound,
)
from reef_cli.core.ids import ContentId, ReleaseId, new_release_id, release_step
from reef_cli.core.types import Artifact, Draft, Operation, Release, Surface
from reef_cli.releases import base, routing
from reef_cli.releases.artifact import SURFACES, as_kind
from reef_cli.releases.card import model_card
from reef_cli.releases.chain import Chain, Chains, checked, head_ref, held_ref
from reef_cli.releases.collect import Collector, GcReport, Keep
from reef_cli.releases.compact import IDLE_S, Compactor, CompactReport
from reef_cli.releases.contents import Content, Contents, attributes, storage_errors
from reef_cli.releases.diff import ReleaseDiff, diff
from reef_cli.releases.git import ZERO, Git, RefUpdate, TreeEntry
from reef_cli.releases.lock import Locks
from reef_cli.releases.manifest import Entry, encode
from reef_cli.releases.objects import ObjectStore
from reef_cli.releases.remote import Remote, Transfer
from reef_cli.releases.routing import Policy
from reef_cli.releases.verify import Problem, Verifier


class ReleaseService:
    """Artifacts and chains below `home`. `lfs`: `auto`, `always` (git-lfs must be there) or `never` (not even for remotes)."""

    def __init__(self, home: Path, *, clock: Clock | None = None, lfs: str = "auto") -> None:
        if lfs == "always" and shutil.which("git-lfs") is None:
            raise MissingDependency(
                "git-lfs is not installed", why="storage.lfs is `always`", hint="install git-lfs, or use `auto`"
            )
        self.home = home.absolute()
        self.repo = self.home / "releases.git"
        self._clock = clock or SystemClock()
        self._git = Git(self.repo)
        with storage_errors("opening the releases"):
            self._git.ensure()
        self._locks = Locks(self.repo)
        self._objects = ObjectStore(self.repo)
        self._contents = Contents(self.home, self._git, self._objects, self._locks, self._clock)
        self._chains = Chains(self._git, self._locks, self._objects)
        self._compactor = Compactor(self._git, self._chains, self._contents, self._objects, self._locks, self._clock)
        self._remote = Remote(self._git, self._chains, self._contents, self._objects, self._locks, lfs)

    # Artifacts

    def store(self, directory: Path, kind: str, *, take: bool = False) -> Artifact:
        """Take a folder's bytes into the store. `UnsupportedArtifact`, `StorageError`; a failure leaves nothing behind.

        `take` hands the folder's files over: they are linked instead of copied, and must not be written to any more.
        """
        if kind == "base":
            raise InvalidRequest("base models are not stored", hint="use base_artifact()")
        return self._contents.store(directory, as_kind(kind), take=take)

    def directory(self, content_id: ContentId) -> Path | None:
        """A read-only folder with a content's files; None for base models; `NotRestorable` when its bytes are gone."""
        return self._contents.directory(content_id)

    def artifact(self, content_id: ContentId) -> Artifact:
        """The facts of a stored content; `NotRestorable` when the store does not know it."""
        return self._contents.load(content_id).artifact

    def base_artifact(self, model_dir: Path) -> Artifact:
        """The content id of a base model, without copying it."""
        return base.base_artifact(model_dir, self.home / "base-digests.json")

    # Reading

    def scenarios(self) -> list[str]:
        """Scenarios that have a chain."""
        return self._chains.scenarios()

    def head(self, scenario: str, surface: Surface = Surface.WEIGHTS) -> Release | None:
        """The release at a surface's head; the creation release before a harness was released."""
        entry = self._chains.head(scenario, surface)
        return self._chains.view(entry) if entry else None

    def heads(self, scenario: str) -> Mapping[Surface, Release]:
        """The release at each surface's head: of weights always, of the harness once there is one. Empty without a chain."""
        return surfaces.heads(self._chains.read(scenario).releases)

    def tip(self, scenario: str) -> Release | None:
        """The newest release of the main chain, whatever its surface."""
        return self._chains.read(scenario).tip

    def list(self, scenario: str, surface: Surface = Surface.WEIGHTS) -> list[Release]:
        """Newest first: held candidates (pending), then the whole main chain, or that of policies. Empty without a chain."""
        chain = self._chains.read(scenario, surface)
        held = sorted(chain.held.values(), key=lambda entry: entry.release.recorded_at, reverse=True)
        known: dict[str, bool] = {}
        waiting = (self._chains.view(entry, pending=True, known=known) for entry in held)
        return [*waiting, *(self._chains.view(entry, known=known) for entry in chain.entries)]

    def get(self, scenario: str, release_id: str) -> Release:
        """A release of the chain or a held one; `ReleaseNotFound`."""
        chain = self._chains.read(scenario)
        if (entry := chain.find(release_id)) is not None:
            return self._chains.view(entry)
        if (entry := chain.held.get(release_id)) is not None:
            return self._chains.view(entry, pending=True)
        if (entry := self._chains.read(scenario, Surface.ROUTING).find(release_id)) is not None:
            return self._chains.view(entry)
        raise _not_found(scenario, release_id)

    def standing(self, scenario: str, release_id: str) -> Release:
        """`get`, but a held release that was promoted since is what it was promoted to."""
        chain = self._chains.read(scenario)
        entry = chain.standing(release_id)
        if entry is None:
            raise _not_found(scenario, release_id)
        return self._chains.view(entry, pending=release_id in chain.held)

    def policy(self, release: Release | None) -> Policy:
        """The routing policy a release of that surface holds; the empty one for None."""
        return self._contents.policy(release.content_id) if release is not None else routing.EMPTY

    def diff(self, a: Release | ContentId, b: Release | ContentId) -> ReleaseDiff:
        """What changed from `a` to `b`, per file."""
        return diff(self._contents, a, b)

    def verify(self, scenario: str) -> Sequence[Problem]:
        """Walk the chain and re-hash everything; an empty list means it is sound."""
        return Verifier(self._git, self._chains, self._contents, self._objects).verify(scenario)

    # Writing

    def create(self, scenario: str, base: Artifact, evidence: Mapping[str, Any] | None = None, author: str = "reef") -> Release:
        """The creation release of a scenario; what it was, when there is one already."""
        chain = self._chains.read(scenario)
        if chain.entries:
            return self._chains.view(chain.entries[-1])
        if base.kind == "base":
            self._contents.register(base)
        draft = Draft(base.content_id, base.kind, SURFACES[base.kind], Operation.CREATION, author, evidence or {}, gated=True)
        try:
            return self._append(chain, draft)
        except ConflictError:
            return self._chains.view(self._chains.require(scenario).entries[-1])

    def publish(self, scenario: str, draft: Draft, expected_head: ReleaseId | None) -> Release:
        """Append a release. `HeadMoved` when its surface's head is another than expected; None expects the present one."""
        if draft.surface is Surface.ROUTING:
            raise InvalidRequest("a routing policy has a chain of its own", hint="release it with route()")
        chain = self._chains.require(scenario)
        self._expect(chain, draft.surface, expected_head)
        self._check_id(chain, draft.release_id)
        return self._append(chain, draft)

    def hold(self, scenario: str, draft: Draft, expected_head: ReleaseId | None) -> Release:
        """Keep a candidate for a person to decide; the head stays."""
        chain = self._chains.require(scenario)
        self._expect(chain, draft.surface, expected_head)
        self._check_id(chain, draft.release_id)
        with self._locks.writing(), storage_errors("holding a release"):
            entry = self._commit(chain, draft)
            ref = held_ref(scenario, entry.release.release_id)
            self._chains.move(scenario, [RefUpdate(ref, entry.release.commit, ZERO)], expected_head, draft.surface)
        return self._chains.view(entry, pending=True)

    def route(
        self,
        scenario: str,
        policy: Policy,
        expected_head: str | None = None,
        author: str = "user",
        operation: Operation = Operation.ROUTE,
        evidence: Mapping[str, Any] | None = None,
    ) -> Release:
        """Release a routing policy. `expected_head` is the policy's release that was seen, `routing.NO_POLICY` for none.

        `ReleaseNotFound`, `NotRestorable` for what the policy names; the collector cannot take its bytes meanwhile.
        """
        self._chains.require(scenario)
        chain = self._chains.read(scenario, Surface.ROUTING)
        head = chain.tip
        if expected_head is not None and expected_head != (head.release_id if head else routing.NO_POLICY):
            raise self._chains.moved(scenario, expected_head, Surface.ROUTING)
        artifact = self._store_policy(policy)
        draft = Draft(artifact.content_id, artifact.kind, Surface.ROUTING, operation, author, evidence or {})
        return self._append(chain, draft, check=lambda: self._check_named(scenario, policy))

    def promote(
        self,
        scenario: str,
        release_id: ReleaseId,
        expected_head: ReleaseId | None = None,
        author: str = "user",
        evidence: Mapping[str, Any] | None = None,
    ) -> Release:
        """Serve a held candidate: its content becomes a new release at its surface's head. `NotPending`, `HeadMoved`.

        The candidate's own evidence goes with it; `evidence` adds what the promotion rests on.
        """
        chain = self._chains.require(scenario)
        held = chain.held.get(release_id)
        if held is None:
            raise self._why_not_pending(chain, release_id)
        source = held.release
        draft = Draft(
            source.content_id, source.kind, source.surface, Operation.PROMOTE, author,
            {**source.evidence, **(evidence or {})}, source.job_id, source.release_id, source.gated,
        )  # fmt: skip
        self._expect(chain, source.surface, expected_head)
        drop = RefUpdate(held_ref(scenario, release_id), ZERO, source.commit)
        return self._append(chain, draft, drop, others=(source.commit,))

    def rollback(
        self,
        scenario: str,
        release_id: ReleaseId | None = None,
        expected_head: ReleaseId | None = None,
        author: str = "user",
        evidence: Mapping[str, Any] | None = None,
        surface: Surface | None = None,
    ) -> Release:
        """Serve earlier content again, as a new release: by default the nearest earlier one of the surface that is meant."""
        chain = self._chains.require(scenario)
        named = None if release_id is None else self._rollback_target(chain, release_id)
        surface = surfaces.meant(chain.releases, surface, named, expected_head)
        head = self._expect(chain, surface, expected_head)
        target = named or surfaces.previous_content(surfaces.lane(chain.releases, surface))
        if target is None:
            raise ConflictError(f"{scenario} has no earlier content to roll back to", hint="list its releases")
        facts = {"rolled_back_from": head.release_id, **(evidence or {})}
        draft = Draft(
            target.content_id, target.kind, surface, Operation.ROLLBACK, author,
            facts, None, target.release_id, target.gated,
        )  # fmt: skip
        return self._append(chain, draft)

    def dismiss(self, scenario: str, release_id: ReleaseId) -> Release:
        """Take a held candidate off the list; its commit stays in the repository under `refs/reef-archive`."""
        chain = self._chains.require(scenario)
        held = chain.held.get(release_id)
        if held is None:
            raise self._why_not_pending(chain, release_id)
        commit = held.release.commit
        away = RefUpdate(f"refs/reef-archive/{scenario}/dismissed/{release_id}", commit, None)
        self._chains.move(scenario, [away, RefUpdate(held_ref(scenario, release_id), ZERO, commit)], None)
        return self._chains.view(held)

    def archive(self, scenario: str) -> str | None:
        """Put a whole chain aside, so that the name starts afresh; the ref prefix where it is kept, None without a chain."""
        return self._chains.archive(checked(scenario), f"{self._clock.now():.6f}".replace(".", "-"))

    # Upkeep

    def gc(self, *, dry_run: bool, keep: Keep | None = None) -> GcReport:
        """Remove what nothing restorable needs; by default every release of every chain stays restorable."""
        collector = Collector(self._git, self._chains, self._contents, self._objects, self._locks, self._clock)
        with storage_errors("collecting garbage"):
            return collector.collect(keep or Keep(), dry_run=dry_run)

    def compact(self, *, idle_s: float = IDLE_S) -> CompactReport:
        """Keep older full checkpoints as differences; every release stays restorable, byte for byte."""
        with storage_errors("compacting checkpoints"):
            return self._compactor.compact(idle_s=idle_s)

    def push(self, remote: str, scenarios: Sequence[str] | None = None) -> Transfer:
        """Send chains (all by default) and their large files to a git remote."""
        return self._remote.push(remote, scenarios)

    def fetch(self, remote: str, scenarios: Sequence[str] | None = None) -> Transfer:
        """Take chains and large files from a git remote; only forward."""
        return self._remote.fetch(remote, scenarios)

    # How a release comes about

    def _expect(self, chain: Chain, surface: Surface, expected: ReleaseId | None) -> Release:
        head = chain.head(surface) or chain.releases[-1]
        if expected is not None and head.release_id != expected:
            raise self._chains.moved(chain.scenario, expected, surface)
        return head

    def _check_id(self, chain: Chain, wanted: ReleaseId | None) -> None:
        if wanted is None:
            return
        if release_step(wanted) is None:
            raise InvalidRequest(f"{wanted!r} is no release id", hint="make one with new_release_id()")
        if chain.find(wanted) or wanted in chain.held or chain.promotion_of(wanted):
            raise ContentConflict(f"release {wanted} exists already", hint="a release id is used once")

    def _rollback_target(self, chain: Chain, release_id: ReleaseId) -> Release:
        if release_id in chain.held:
            raise NotRestorable(f"{release_id} was never released", why="it is held for review", hint="promote it instead")
        entry = chain.find(release_id)
        if entry is None:
            raise _not_found(chain.scenario, release_id)
        return entry.release

    def _why_not_pending(self, chain: Chain, release_id: str) -> NotPending | ReleaseNotFound:
        if (promoted := chain.promotion_of(release_id)) is not None:
            return NotPending(f"{release_id} was promoted already, as {promoted.release_id}", release_id=promoted.release_id)
        if chain.find(release_id) is not None:
            return NotPending(
                f"{release_id} is not held for review", why="it is part of the chain", hint="to serve it again, roll back to it"
            )
        return _not_found(chain.scenario, release_id)

    def _store_policy(self, policy: Policy) -> Artifact:
        with tempfile.TemporaryDirectory(prefix="reef-policy-") as folder:
            (Path(folder) / routing.FILE).write_bytes(policy.text())
            return self._contents.store(Path(folder), "routing")

    def _check_named(self, scenario: str, policy: Policy) -> None:
        """Every release a policy names is there with all its bytes, and answers. The caller holds the writing lock."""
        chain = self._chains.read(scenario)
        for name in sorted(policy.named):
            entry = chain.standing(name)
            if entry is None:
                raise _not_found(scenario, name)
            if entry.release.surface is Surface.HARNESS:
                raise routing.no_answers(entry.release)
            self._contents.require(entry.release.content_id)

    def _append(
        self,
        chain: Chain,
        draft: Draft,
        *extra: RefUpdate,
        others: tuple[str, ...] = (),
        check: Callable[[], None] | None = None,
    ) -> Release:
        """Append at the end of the chain; only a release of the draft's own surface that came first makes it lose."""
        head = chain.head(draft.surface)
        with self._locks.writing(), storage_errors("publishing"):
            if check is not None:
                check()
            while True:
                entry, old = self._commit(chain, draft, others), chain.tip.commit if chain.tip else ZERO
                move = RefUpdate(head_ref(chain.scenario, chain.surface), entry.release.commit, old)
                try:
                    self._chains.move(chain.scenario, [move, *extra], head.release_id if head else None, draft.surface)
                    break
                except HeadMoved:
                    now = self._chains.read(chain.scenario, chain.surface)
                    if now.tip == chain.tip or now.head(draft.surface) != head:
                        raise
                    chain = now
        self._chains.appended(chain, entry)
        return self._chains.view(entry)

    def _commit(self, chain: Chain, draft: Draft, others: tuple[str, ...] = ()) -> Entry:
        """The commit of a release whose content is wholly there; the caller holds the writing lock until a ref names it.

        `others` are further commits it grew out of.
        """
        content = self._contents.require(draft.content_id)
        if content.kind != draft.kind:
            raise InvalidRequest(f"content {draft.content_id} is of kind {content.kind}, not {draft.kind}")
        parent = chain.tip
        step = parent.step + 1 if parent else 0
        release = Release(
            draft.release_id or new_release_id(step), checked(chain.scenario), parent.release_id if parent else None,
            draft.content_id, draft.kind, draft.surface, draft.operation, step, self._clock.now(), draft.author,
            draft.evidence, draft.job_id, draft.source_release_id, draft.gated,
        )  # fmt: skip
        files = self._files(release, content)
        parents = ([parent.commit] if parent else []) + list(others)
        message = f"{release.release_id} {release.operation} of {chain.scenario}\n\nManifest: {files['manifest.json'].oid}\n"
        return self._chains.commit(Entry(release, content.large), files, parents, message)

    def _files(self, release: Release, content: Content) -> dict[str, TreeEntry]:
        texts = {
            "manifest.json": encode(release, content.large, content.artifact.size),
            "README.md": model_card(replace(release, evidence=dict(release.evidence)), content.about),
        }
        if content.large:
            texts[".gitattributes"] = attributes([s.file.path for s in content.files if s.large])
        oids = self._git.blobs(list(texts.values()))
        files = {name: TreeEntry("", oid) for name, oid in zip(texts, oids, strict=True)}
        return {**files, **content.entries}


def _not_found(scenario: str, release_id: str) -> ReleaseNotFound:
    return ReleaseNotFound(f"no release {release_id!r} in {scenario}", hint=f"list them with `reef release list -s {scenario}`")
