"""What changed between two trees, how changes are applied, and how two lines of change meet.

`diff` speaks of entries; `apply` turns a tree and mutations into a tree; `merge` is three-way: per entry, and inside an entry
per key of its config. What cannot be decided is a conflict that names both sides; nothing is chosen silently.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from reef_cli.core.errors import UnsupportedArtifact
from reef_cli.harness.tree import Entry, Tree, parse_entry

Op = Literal["create", "update", "remove"]
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Mutation:
    """One edit. `entry` is the whole new entry for create and update, None for remove."""

    op: Op
    id: str
    entry: Entry | None = None

    def wire(self) -> dict[str, Any]:
        return {"op": self.op, "id": self.id} | ({"entry": self.entry.wire()} if self.entry else {})


@dataclass(frozen=True, slots=True)
class Change:
    """One entry's difference: `before` None means added, `after` None removed; `keys` are the config keys that differ."""

    id: str
    before: Entry | None
    after: Entry | None

    @property
    def op(self) -> Op:
        return "create" if self.before is None else "remove" if self.after is None else "update"

    @property
    def keys(self) -> tuple[str, ...]:
        old = self.before.config if self.before else {}
        new = self.after.config if self.after else {}
        return tuple(sorted(key for key in {*old, *new} if old.get(key, _ABSENT) != new.get(key, _ABSENT)))


@dataclass(frozen=True, slots=True)
class Conflict:
    """Both sides changed the same thing differently. `key` is empty when whole entries collide."""

    id: str
    key: str
    reason: str


@dataclass(frozen=True, slots=True)
class Merge:
    """The merged tree with our side kept where there is a conflict."""

    tree: Tree
    conflicts: tuple[Conflict, ...]


def parse_mutations(raw: Any) -> list[Mutation]:
    """Mutations from their wire form: one object or a list of `{op, id?, entry?}`."""
    items = raw if isinstance(raw, list) else [raw]
    found = []
    for item in items:
        op = item.get("op") if isinstance(item, Mapping) else None
        if op not in ("create", "update", "remove") or set(item) - {"op", "id", "entry"}:
            raise UnsupportedArtifact("a mutation is {op: create|update|remove, id, entry}", why=f"got {str(item)[:120]!r}")
        entry = parse_entry(item["entry"]) if item.get("entry") is not None else None
        entry_id = item.get("id") or (entry.id if entry else None)
        if not isinstance(entry_id, str) or (entry is None) != (op == "remove") or (entry and entry.id != entry_id):
            raise UnsupportedArtifact(
                f"the {op} mutation does not name one entry", hint="remove takes an id, create and update an entry"
            )
        found.append(Mutation(op, entry_id, entry))
    return found


def apply(tree: Tree, mutations: Iterable[Mutation]) -> Tree:
    """The tree after the mutations, validated as a whole; entries keep their place, new ones go last."""
    entries = {entry.id: entry for entry in tree}
    for mutation in mutations:
        exists = mutation.id in entries
        if exists == (mutation.op == "create"):
            raise UnsupportedArtifact(
                f"cannot {mutation.op} entry {mutation.id!r}", why="it exists already" if exists else "there is no such entry"
            )
        if mutation.entry is None:
            del entries[mutation.id]
        else:
            entries[mutation.id] = mutation.entry
    return Tree.of(entries.values())


def diff(before: Tree, after: Tree) -> list[Change]:
    """Changes per entry, in the order of the new tree, removals last. A change of place alone is none."""
    old = {entry.id: entry for entry in before}
    new = {entry.id: entry for entry in after}
    changes = [Change(name, old.get(name), entry) for name, entry in new.items() if old.get(name) != entry]
    return changes + [Change(name, entry, None) for name, entry in old.items() if name not in new]


def mutations(changes: Sequence[Change]) -> list[Mutation]:
    """The mutations that lead from a diff's old tree to its new one (up to the order of entries)."""
    return [Mutation(change.op, change.id, change.after) for change in changes]


def merge(base: Tree, ours: Tree, theirs: Tree) -> Merge:
    """Three-way merge. The order is ours, with their new entries behind it."""
    old, own, other = ({entry.id: entry for entry in tree} for tree in (base, ours, theirs))
    conflicts: list[Conflict] = []
    merged: list[Entry] = []
    for name in [*own, *(name for name in other if name not in own)]:
        entry = _merge_entry(name, old.get(name), own.get(name), other.get(name), conflicts)
        if entry is not None:
            merged.append(entry)
    return Merge(Tree.of(merged), tuple(conflicts))


def _merge_entry(
    name: str, old: Entry | None, own: Entry | None, other: Entry | None, conflicts: list[Conflict]
) -> Entry | None:
    if own == other or other == old:
        return own
    if own == old:
        return other
    if own is None or other is None:
        conflicts.append(Conflict(name, "", "one side removed the entry, the other changed it"))
        return own
    if own.kind != other.kind:
        conflicts.append(Conflict(name, "", f"ours is of kind {own.kind}, theirs of kind {other.kind}"))
        return own
    config: dict[str, Any] = {}
    base = old.config if old is not None and old.kind == own.kind else {}
    for key in [*own.config, *(key for key in other.config if key not in own.config)]:
        was, mine, their = (source.get(key, _ABSENT) for source in (base, own.config, other.config))
        chosen = their if mine == was else mine
        if mine not in (was, their) and their != was:
            conflicts.append(Conflict(name, key, "both sides changed it differently"))
        if chosen is not _ABSENT:
            config[key] = chosen
    return Entry(name, own.kind, config)
