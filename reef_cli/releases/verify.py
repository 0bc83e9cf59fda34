"""Walking a chain and re-hashing everything it names.

A problem is a fact with the release it was found at; nothing is repaired here. Content that the collector dropped on purpose
is reported as `dropped`, so that it can be told from damage.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from reef_cli.core.errors import NotRestorable, ReefError
from reef_cli.core.types import Surface
from reef_cli.releases.artifact import content_id
from reef_cli.releases.chain import Chain, Chains
from reef_cli.releases.contents import Content, Contents
from reef_cli.releases.git import Git, GitError
from reef_cli.releases.manifest import Entry
from reef_cli.releases.objects import ObjectStore


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong with a release. `what` is one sentence; `path` the file it is about, where there is one."""

    kind: Literal["link", "damaged", "missing", "dropped", "git"]
    what: str
    release_id: str | None = None
    path: str | None = None


class Verifier:
    """Checks chains of one store. Contents shared by several releases are read once."""

    def __init__(self, git: Git, chains: Chains, contents: Contents, objects: ObjectStore) -> None:
        self._git = git
        self._chains = chains
        self._contents = contents
        self._objects = objects

    def verify(self, scenario: str) -> list[Problem]:
        """Problems of the scenario's chain, and of its routing policies where it has any."""
        try:
            chain = self._chains.require(scenario)
            policies = self._chains.read(scenario, Surface.ROUTING)
        except GitError as error:
            return [Problem("git", error.message)]
        return [*self._chain(chain), *(self._chain(policies) if policies.entries else ())]

    def _chain(self, chain: Chain) -> list[Problem]:
        problems = [*self._fsck(chain), *self._links(chain)]
        seen: set[str] = set()
        for entry in (*chain.entries, *chain.held.values()):
            if entry.release.content_id not in seen:
                seen.add(entry.release.content_id)
                problems += self._content(entry)
        return problems

    def _fsck(self, chain: Chain) -> Iterator[Problem]:
        heads = [chain.entries[0].release.commit, *(entry.release.commit for entry in chain.held.values())]
        try:
            self._git.run("fsck", "--no-dangling", "--no-progress", *heads)
        except GitError as error:
            yield Problem("git", error.message)

    def _links(self, chain: Chain) -> Iterator[Problem]:
        links = self._git.first_parents(chain.entries[0].release.commit)
        trees = self._git.read([f"{link.commit}:manifest.json" for link in links])
        for link, blob in zip(links, trees, strict=True):
            if blob is None or link.manifest not in (None, blob[0]):
                yield Problem("link", f"commit {link.commit[:12]} names another manifest than it holds")
        ids = {entry.release.release_id for entry in chain.entries}
        if len(ids) != len(chain.entries):
            yield Problem("link", "a release id occurs twice")
        for newer, older in zip(chain.entries, (*chain.entries[1:], None), strict=True):
            release = newer.release
            parent = older.release if older else None
            if release.scenario != chain.scenario:
                yield Problem("link", f"belongs to scenario {release.scenario!r}", release.release_id)
            if release.parent_release_id != (parent.release_id if parent else None):
                yield Problem("link", f"names parent {release.parent_release_id}, its commit's is another", release.release_id)
            if release.step != (parent.step + 1 if parent else 0):
                yield Problem("link", f"step {release.step} does not follow its parent's", release.release_id)

    def _content(self, entry: Entry) -> Iterator[Problem]:
        release = entry.release
        try:
            content = self._contents.load(release.content_id)
        except NotRestorable as error:
            yield Problem("missing", error.message, release.release_id)
            return
        except (ReefError, ValueError) as error:
            yield Problem("damaged", f"content.json is unreadable: {error}", release.release_id)
            return
        if content_id(content.kind, content.artifact.files) != release.content_id:
            yield Problem("damaged", "the content id does not match the list of files", release.release_id)
        if content.kind != "base":
            yield from self._files(content, release.release_id)

    def _files(self, content: Content, release_id: str) -> Iterator[Problem]:
        small = [stored.file for stored in content.files if not stored.large]
        blobs = self._git.read([f"{content.tree}:{file.path}" for file in small])
        for file, blob in zip(small, blobs, strict=True):
            if blob is None:
                yield Problem("missing", "the file is not in git", release_id, file.path)
            elif hashlib.sha256(blob[1]).hexdigest() != file.sha256:
                yield Problem("damaged", "the file in git has another digest", release_id, file.path)
        for stored in content.files:
            if stored.large:
                digest = self._objects.digest(stored.file.sha256)
                if digest is None:
                    yield Problem("dropped", "its bytes are no longer in the store", release_id, stored.file.path)
                elif digest != stored.file.sha256:
                    yield Problem("damaged", "the stored object has another digest", release_id, stored.file.path)
