"""The harness tree: a flat, ordered list of entries `{id, kind, config}`, and its canonical form as a folder of files.

A tree is a value: two trees with the same entries in the same order serialise to the same bytes, hence to one content id.
Nothing in it names an endpoint, a token or an agent's own file layout; adapters add those. `Tree.of` validates, so a `Tree`
in hand is always sound.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from reef_cli.core.errors import UnsupportedArtifact
from reef_cli.harness import files as tree_files
from reef_cli.harness.files import TreeFile

Kind = Literal["config", "rules", "system", "skill", "command", "agent", "mcp", "extension"]
KINDS: tuple[Kind, ...] = get_args(Kind)
FORMAT = 1
INDEX = "tree.json"
MAX_ENTRIES = 500
_TEXT = "text.md"


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing around the model. `config` is JSON-safe; its keys per kind are listed in `validate.py`."""

    id: str
    kind: Kind
    config: Mapping[str, Any]

    def wire(self) -> dict[str, Any]:
        """The JSON form used by proposals and manifests."""
        return {"id": self.id, "kind": self.kind, "config": dict(self.config)}

    @property
    def text(self) -> str:
        """The entry's prose or code; empty for kinds that have none."""
        return str(self.config.get("text", ""))

    @property
    def extra(self) -> dict[str, TreeFile]:
        """Files that travel with a skill or an extension, by relative path."""
        return {path: tree_files.parse(path, raw) for path, raw in self.config.get("files", {}).items()}


@dataclass(frozen=True, slots=True)
class Tree:
    """Entries in order; ids are unique."""

    entries: tuple[Entry, ...] = ()

    @classmethod
    def of(cls, entries: Iterable[Entry | Mapping[str, Any]]) -> "Tree":
        """A validated tree in canonical form. Raises `UnsupportedArtifact` naming the entry and the rule it breaks."""
        from reef_cli.harness.validate import checked_tree  # validate.py builds on these types

        return checked_tree([entry if isinstance(entry, Entry) else parse_entry(entry) for entry in entries])

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def get(self, entry_id: str) -> Entry | None:
        return next((entry for entry in self.entries if entry.id == entry_id), None)

    def of_kind(self, kind: Kind) -> list[Entry]:
        return [entry for entry in self.entries if entry.kind == kind]

    def wire(self) -> list[dict[str, Any]]:
        return [entry.wire() for entry in self.entries]

    @property
    def requires(self) -> list[dict[str, str]]:
        """What the user's machine must have (`kind`, `name`, `reason`), first mention first, without repeats."""
        found: dict[tuple[str, str], dict[str, str]] = {}
        for entry in self.entries:
            for item in entry.config.get("requires", ()):
                found.setdefault((item["kind"], item["name"]), {"reason": "", **item})
        return list(found.values())


def parse_entry(raw: Mapping[str, Any]) -> Entry:
    """An entry from its wire form, shape checked only."""
    unknown = set(raw) - {"id", "kind", "config"}
    if unknown or not isinstance(raw.get("id"), str) or not isinstance(raw.get("config", {}), Mapping):
        raise UnsupportedArtifact(
            "an entry needs exactly id, kind and config", why=f"unknown keys: {sorted(unknown)}" if unknown else ""
        )
    kind = raw.get("kind")
    if kind not in KINDS:
        raise UnsupportedArtifact(f"entry {raw['id']!r} has the unknown kind {kind!r}", hint=f"one of {', '.join(KINDS)}")
    return Entry(raw["id"], kind, dict(raw.get("config", {})))


def serialise(tree: Tree) -> dict[str, TreeFile]:
    """The canonical files of a tree: `tree.json`, and per entry `<kind>/<id>/{entry.json,text.md,files/...}`."""
    index = {"format": FORMAT, "entries": [{"id": entry.id, "kind": entry.kind} for entry in tree]}
    out = {INDEX: TreeFile(canonical(index))}
    for entry in tree:
        base = f"{entry.kind}/{entry.id}"
        rest = {key: value for key, value in entry.config.items() if key not in ("text", "files")}
        out[f"{base}/entry.json"] = TreeFile(canonical(rest))
        if "text" in entry.config:
            out[f"{base}/{_TEXT}"] = TreeFile(entry.text.encode())
        for path, file in entry.extra.items():
            out[f"{base}/files/{path}"] = file
    return out


def texts(tree: Tree) -> tuple[dict[str, str], list[str]]:
    """The canonical files that are text, by path, and the paths of the others."""
    found: dict[str, str] = {}
    others: list[str] = []
    for path, file in serialise(tree).items():
        try:
            found[path] = file.data.decode()
        except UnicodeDecodeError:
            others.append(path)
    return found, others


def deserialise(files: Mapping[str, TreeFile]) -> Tree:
    """The tree of canonical files. Unknown or missing files are errors: nothing rides along unseen."""
    try:
        index = json.loads(files[INDEX].data)
        if index["format"] != FORMAT:
            raise UnsupportedArtifact(f"the tree has format {index['format']!r}", hint="upgrade Reef")
        entries = [_read_entry(files, item["kind"], item["id"]) for item in index["entries"]]
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, UnsupportedArtifact):
            raise
        raise UnsupportedArtifact("the folder is not a harness tree", why=f"{type(error).__name__}: {error}") from error
    tree = Tree.of(entries)
    strangers = set(files) - set(serialise(tree))
    if strangers:
        raise UnsupportedArtifact("the folder holds files that belong to no entry", why=", ".join(sorted(strangers)[:5]))
    return tree


def _read_entry(files: Mapping[str, TreeFile], kind: Kind, entry_id: str) -> Entry:
    base = f"{kind}/{entry_id}"
    config: dict[str, Any] = json.loads(files[f"{base}/entry.json"].data)
    if f"{base}/{_TEXT}" in files:
        config["text"] = files[f"{base}/{_TEXT}"].data.decode()
    prefix = f"{base}/files/"
    extra = {path.removeprefix(prefix): tree_files.wire(file) for path, file in files.items() if path.startswith(prefix)}
    if extra:
        config["files"] = extra
    return parse_entry({"id": entry_id, "kind": kind, "config": config})


def write(tree: Tree, directory: Path) -> None:
    """Write the canonical folder (which must not exist or be empty): what the artifact store takes as kind `harness`."""
    tree_files.write(serialise(tree), directory)


def read(directory: Path) -> Tree:
    """The tree of a canonical folder. Symbolic links and special files are refused."""
    return deserialise(tree_files.read(directory))


def canonical(value: Any) -> bytes:
    """Sorted, indented JSON with a final newline: stable bytes that diff well."""
    return (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n").encode()
