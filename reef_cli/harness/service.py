"""What a gateway, a CLI or a proposer asks about the harnesses of scenarios. Synchronous; callers run it in threads.

Reads the release chain through the Protocol `Releases` and publishes nothing: a proposal that passes admission is handed back,
and takes the same road as any candidate. A chain may hold weights and harness releases; the harness in force is the one at the
head of its surface.
"""

import hashlib
import hmac
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from reef_cli.core.errors import AdapterNotFound, InvalidRequest, ProposalConflict, ReleaseNotFound, UnsupportedArtifact
from reef_cli.core.ids import ContentId, ReleaseId
from reef_cli.core.types import Artifact, Release, Surface
from reef_cli.harness import discovery, install, merge, pages
from reef_cli.harness import tree as trees
from reef_cli.harness.adapter import Adapter
from reef_cli.harness.merge import Change, Conflict, Mutation
from reef_cli.harness.render import admit
from reef_cli.harness.tree import Tree


class Releases(Protocol):
    """The part of the release service that is needed here."""

    def list(self, scenario: str) -> Sequence[Release]: ...

    def directory(self, content_id: ContentId) -> Path | None: ...

    def store(self, directory: Path, kind: str) -> Artifact: ...


@dataclass(frozen=True, slots=True)
class Proposal:
    """An admitted edit: mutations against `base`, carried over onto the harness in force, and the tree that would result."""

    scenario: str
    base: ReleaseId | None
    onto: ReleaseId | None
    mutations: tuple[Mutation, ...]
    tree: Tree
    changes: tuple[Change, ...]
    reason: str = ""

    def wire(self) -> dict[str, Any]:
        return {
            "scenario": self.scenario,
            "base_release_id": self.base,
            "onto_release_id": self.onto,
            "reason": self.reason,
            "mutations": [mutation.wire() for mutation in self.mutations],
            "changed": pages.summary(self.changes),
        }


class HarnessService:
    """See the module. `model` gives the model name an installed agent shall ask for; `page_secret` keys the page links."""

    def __init__(
        self,
        releases: Releases,
        *,
        page_secret: bytes,
        model: Callable[[str], str] = lambda _: "default",
        adapters: Callable[[], Mapping[str, Adapter]] = discovery.adapters,
    ) -> None:
        self._releases = releases
        self._secret = page_secret
        self._model = model
        self._adapters = adapters
        self._trees: dict[str, Tree] = {}

    # the chain

    def chain(self, scenario: str) -> list[Release]:
        """Harness releases, oldest first, held ones included. One with the creation's content takes the harness away."""
        return [release for release in reversed(self._releases.list(scenario)) if release.surface is Surface.HARNESS]

    def current(self, scenario: str) -> Release | None:
        """The harness in force; None before the first one."""
        return next((release for release in reversed(self.chain(scenario)) if not release.pending), None)

    def find(self, scenario: str, release_id: str | None) -> Release | None:
        """One harness release, or the one in force when none is named. Raises `ReleaseNotFound`."""
        if release_id is None:
            return self.current(scenario)
        found = next((release for release in self.chain(scenario) if release.release_id == release_id), None)
        if found is None:
            raise ReleaseNotFound(
                f"scenario {scenario!r} has no harness release {release_id!r}", hint="see GET /reef/harness/releases"
            )
        return found

    def tree_of(self, release: Release | None) -> Tree:
        """The tree of a release; an empty one for None. Raises `NotRestorable` when its bytes are gone."""
        if release is None or release.kind != "harness":
            return Tree()
        if release.content_id not in self._trees:
            directory = self._releases.directory(release.content_id)
            self._trees[release.content_id] = trees.read(directory) if directory is not None else Tree()
        return self._trees[release.content_id]

    def tree(self, scenario: str, release_id: str | None = None) -> Tree:
        return self.tree_of(self.find(scenario, release_id))

    def changes(self, release: Release) -> list[Change]:
        """What a release changed against the harness that was in force before it."""
        before = [item for item in self.chain(release.scenario) if item.step < release.step and not item.pending]
        return merge.diff(self.tree_of(before[-1] if before else None), self.tree_of(release))

    def diff(self, scenario: str, a: str, b: str) -> list[dict[str, Any]]:
        """Changes per entry between two harness releases."""
        found = merge.diff(self.tree(scenario, a), self.tree(scenario, b))
        return [
            {
                "id": item.id,
                "op": item.op,
                "keys": list(item.keys),
                "before": item.before and item.before.wire(),
                "after": item.after and item.after.wire(),
            }
            for item in found
        ]

    def store(self, tree: Tree) -> Artifact:
        """Put a tree into the artifact store."""
        root = Path(tempfile.mkdtemp(prefix="reef-tree-"))
        try:
            trees.write(tree, root / "tree")
            return self._releases.store(root / "tree", "harness")
        finally:
            shutil.rmtree(root, ignore_errors=True)

    # what routes answer

    def manifest(self, scenario: str, release_id: str | None = None) -> dict[str, Any]:
        """`GET /reef/harness`: the tree in force (or a pinned one) with its facts.

        `files` and `artifact_version` are what `reef-client` pulls: the canonical folder by path. Files that are no text are
        named in `binary_files`; `entries` has their bytes.
        """
        release = self.find(scenario, release_id)
        tree = self.tree_of(release)
        facts = self._row(release) if release else {"release_id": None, "content_id": None, "step": None, "changed": ""}
        needs = {"requires": tree.requires, "needs_nothing": self._needs_nothing(scenario)}
        texts, others = trees.texts(tree)
        pulled = {"artifact_version": release.release_id if release else "", "files": texts, "binary_files": others}
        return {"scenario": scenario, **facts, "model": self._model(scenario), **needs, "entries": tree.wire(), **pulled}

    def releases(self, scenario: str) -> list[dict[str, Any]]:
        """`GET /reef/harness/releases`: oldest first."""
        current = self.current(scenario)
        return [self._row(release) | {"current": release == current} for release in self.chain(scenario)]

    def _row(self, release: Release) -> dict[str, Any]:
        return {
            "release_id": release.release_id,
            "artifact_version": release.release_id,
            "parent_release_id": release.parent_release_id,
            "content_id": release.content_id,
            "step": release.step,
            "operation": release.operation.value,
            "pending": release.pending,
            "restorable": release.restorable,
            "recorded_at": release.recorded_at,
            "author": release.author,
            "changed": self._changed(release),
            "page": self.page_link(release),
        }

    def _changed(self, release: Release) -> str:
        return pages.summary(self.changes(release)) if release.restorable else "its content is no longer stored"

    def page(self, scenario: str, step: int) -> str:
        """`GET /reef/harness/releases/{step}/page`: self-contained HTML."""
        release = next((item for item in self.chain(scenario) if item.step == step), None)
        if release is None:
            raise ReleaseNotFound(f"scenario {scenario!r} has no harness release at step {step}")
        return pages.page(release, self.tree_of(release), self.changes(release), self._fitting(release))

    def _fitting(self, release: Release) -> list[str]:
        tree, names = self.tree_of(release), []
        for name, adapter in self._adapters().items():
            try:
                admit(adapter, tree)
            except UnsupportedArtifact:
                continue
            names.append(name)
        return sorted(names)

    def page_key(self, scenario: str) -> str:
        """The key that opens this scenario's pages and nothing else; links carry it in place of a token."""
        return hmac.new(self._secret, f"reef page {scenario}".encode(), hashlib.sha256).hexdigest()[:32]

    def page_link(self, release: Release) -> str:
        """The path of a release's page, with the key that opens it."""
        query = f"scenario={release.scenario}&key={self.page_key(release.scenario)}"
        return f"/reef/harness/releases/{release.step}/page?{query}"

    def mark(self, text: str) -> str:
        """A mark of `text` that only this deployment can make: tells what it stored itself from what a client claims."""
        return hmac.new(self._secret, f"reef mark {text}".encode(), hashlib.sha256).hexdigest()

    def opens_page(self, scenario: str, key: str) -> bool:
        return hmac.compare_digest(self.page_key(scenario).encode(), key.encode())

    def adapters(self) -> list[dict[str, Any]]:
        """`GET /reef/harness/adapters`."""
        return [adapter.summary() for _, adapter in sorted(self._adapters().items())]

    def payload(self, scenario: str, adapter: str, gateway: str, release_id: str | None = None) -> dict[str, Any]:
        """The installation of a release for one agent, as data. `gateway` is the address the user's request reached."""
        name, version = discovery.split(adapter)
        known = self._adapters()
        if name not in known:
            raise AdapterNotFound(f"no adapter is named {name!r}", hint=f"known: {', '.join(sorted(known))}")
        release = self.find(scenario, release_id)
        target = install.Target(_address(gateway), self._model(scenario), version)
        facts = install.ReleaseFacts(scenario)
        if release is not None:
            facts = install.ReleaseFacts(
                scenario,
                release.release_id,
                release.content_id,
                release.step,
                self._changed(release),
                self._needs_nothing(scenario),
            )
        return install.payload(known[name], self.tree_of(release), facts, target)

    def install_script(self, scenario: str, adapter: str, gateway: str, release_id: str | None = None) -> str:
        """`GET /reef/harness/install?adapter=…`: the shell script."""
        return install.script(self.payload(scenario, adapter, gateway, release_id))

    def _needs_nothing(self, scenario: str) -> str | None:
        served = [release for release in reversed(self.chain(scenario)) if not release.pending and release.restorable]
        return next((release.release_id for release in served if not self.tree_of(release).requires), None)

    # proposals

    def propose(self, scenario: str, raw: Any, base_release_id: str | None = None, reason: str = "") -> Proposal:
        """`POST /reef/harness/proposals`: check an edit and carry it over onto the harness in force.

        Raises `UnsupportedArtifact` for unsound edits (credentials, paths, formats), `ReleaseNotFound`, `ProposalConflict`.
        """
        mutations = merge.parse_mutations(raw)
        if not mutations or len(mutations) > 50:
            raise InvalidRequest("a proposal holds 1 to 50 mutations")
        if not isinstance(reason, str) or len(reason) > 4000:
            raise InvalidRequest("the reason is text of at most 4000 characters")
        current = self.current(scenario)
        base = self.find(scenario, base_release_id) if base_release_id else current
        ours, origin = self.tree_of(current), self.tree_of(base)
        merged = merge.merge(origin, ours, merge.apply(origin, mutations))
        if merged.conflicts:
            raise _conflict(merged.conflicts, current)
        changes = tuple(merge.diff(ours, merged.tree))
        if not changes:
            raise InvalidRequest("the proposal changes nothing", hint="the harness in force already is like this")
        onto = current.release_id if current else None
        return Proposal(scenario, base.release_id if base else None, onto, tuple(mutations), merged.tree, changes, reason)


def _conflict(conflicts: Sequence[Conflict], current: Release | None) -> ProposalConflict:
    first = conflicts[0]
    return ProposalConflict(
        f"the proposal collides with the harness in force at entry {first.id!r}",
        why=first.reason,
        hint="read GET /reef/harness again and propose against its release",
        head=current.release_id if current else None,
        conflicts=[{"id": item.id, "key": item.key, "reason": item.reason} for item in conflicts],
    )


def _address(gateway: str) -> str:
    parts = urlsplit(gateway)
    if (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or any(char.isspace() or char in "\"'<>\\" for char in gateway)
    ):
        raise InvalidRequest(f"{gateway!r} is no address of a gateway", hint="http://host:port")
    return gateway.rstrip("/")
