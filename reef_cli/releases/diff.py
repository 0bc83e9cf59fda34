"""What changed between two contents: per file, with a text diff where both sides are small text.

Weights show sizes and digests; nobody reads a diff of tensors.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from reef_cli.core.ids import ContentId
from reef_cli.core.types import ArtifactFile, Release
from reef_cli.releases.contents import Content, Contents

_TEXT_LIMIT = 64 * 1024


@dataclass(frozen=True, slots=True)
class FileDiff:
    """One file that differs. `before` and `after` are None where the file does not exist; `text` is a unified diff."""

    path: str
    change: Literal["added", "removed", "changed"]
    before: ArtifactFile | None
    after: ArtifactFile | None
    text: str | None = None


@dataclass(frozen=True, slots=True)
class ReleaseDiff:
    """All differing files, by path. `same` when the contents are one."""

    before: ContentId
    after: ContentId
    files: tuple[FileDiff, ...]

    @property
    def same(self) -> bool:
        return self.before == self.after


def diff(contents: Contents, a: Release | ContentId, b: Release | ContentId) -> ReleaseDiff:
    """From `a` to `b`; `NotRestorable` when the store knows one of them no longer."""
    before, after = (contents.load(side.content_id if isinstance(side, Release) else side) for side in (a, b))
    old, new = ({stored.file.path: stored.file for stored in content.files} for content in (before, after))
    paths = [path for path in sorted(old.keys() | new.keys()) if old.get(path) != new.get(path)]
    texts_a, texts_b = _texts(contents, before, paths), _texts(contents, after, paths)
    files = tuple(_file(path, old.get(path), new.get(path), texts_a.get(path), texts_b.get(path)) for path in paths)
    return ReleaseDiff(before.content_id, after.content_id, files)


def _file(path: str, a: ArtifactFile | None, b: ArtifactFile | None, text_a: str | None, text_b: str | None) -> FileDiff:
    change: Literal["added", "removed", "changed"] = "added" if a is None else "removed" if b is None else "changed"
    readable = (a is None or text_a is not None) and (b is None or text_b is not None)
    text = _unified(path, text_a or "", text_b or "") if readable else None
    return FileDiff(path, change, a, b, text)


def _unified(path: str, a: str, b: str) -> str:
    lines = difflib.unified_diff(a.splitlines(), b.splitlines(), f"a/{path}", f"b/{path}", lineterm="")
    return "\n".join(lines)


def _texts(contents: Contents, content: Content, paths: list[str]) -> Mapping[str, str]:
    """The small text files among `paths`."""
    if content.kind == "base":
        return {}
    small = [s.file.path for s in content.files if not s.large and s.file.size <= _TEXT_LIMIT and s.file.path in set(paths)]
    texts: dict[str, str] = {}
    for path, data in zip(small, contents.read_small(content, small), strict=True):
        if b"\0" not in data:
            try:
                texts[path] = data.decode()
            except UnicodeDecodeError:
                continue
    return texts
