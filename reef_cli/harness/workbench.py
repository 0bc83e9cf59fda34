"""A tree mounted in the compose engine: the place where mutations are tried and, when rejected, undone exactly.

Each entry is one fiber that provides the service `entry:<id>` and needs those of the entries it `uses`. Changing an entry
restarts it and whatever uses it, and nothing else. A broken entry fails alone. What is mounted is readable as a `Tree`; after
any sequence of changes it is the tree that loading the final entries from scratch would have given.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from reef_cli.core.errors import ConflictError
from reef_cli.harness.compose import Context, Loader, Options, Plugin, State
from reef_cli.harness.merge import Mutation, apply
from reef_cli.harness.tree import KINDS, Entry, Tree, parse_entry

Check = Callable[[Entry], None]
"""Raises when an entry cannot live in the harness (a load test of code, a parse of structured text)."""


@dataclass(slots=True)
class World:
    """What mounted entries have done: the entries present, and a count of starts per entry."""

    present: dict[str, Entry] = field(default_factory=dict)
    starts: dict[str, int] = field(default_factory=dict)


class Mounted:
    """A mutation under trial. Exactly one of `keep` and `undo` ends it."""

    def __init__(self, bench: "Workbench", before: Tree, after: Tree, touched: frozenset[str]) -> None:
        self._bench = bench
        self.before = before
        self.tree = after
        self.touched = touched
        """Ids of the entries that were started, restarted or stopped by the mutation."""

    def keep(self) -> Tree:
        """Accept: the mounted tree is the workbench's tree from now on."""
        self._bench.close(self)
        return self.tree

    async def undo(self) -> Tree:
        """Reject: the world is as it was before the mutation."""
        self._bench.close(self)
        await self._bench.load(self.before)
        return self.before


class Workbench:
    """See the module. One mutation is on trial at a time; a second `mount` is a `ConflictError`."""

    def __init__(self, check: Check | None = None) -> None:
        self.world = World()
        self.tree = Tree()
        self._check = check
        self._context = Context()
        self._loader = Loader(self._context, self._plugin)
        self._plugins: dict[str, Plugin] = {kind: self._make(kind) for kind in KINDS}
        self._trial: Mounted | None = None

    async def load(self, tree: Tree) -> None:
        """Reconcile the world onto `tree`."""
        await self._loader.load([_options(entry) for entry in tree])
        self.tree = tree

    async def mount(self, mutations: Iterable[Mutation]) -> Mounted:
        """Try mutations. Raises `UnsupportedArtifact` before anything changes when the result is no sound tree."""
        if self._trial is not None:
            raise ConflictError("a mutation is on trial already", hint="keep or undo it first")
        before, starts, present = self.tree, dict(self.world.starts), set(self.world.present)
        after = apply(before, mutations)
        await self.load(after)
        changed = {name for name, count in self.world.starts.items() if starts.get(name) != count}
        self._trial = Mounted(self, before, after, frozenset(changed | (present ^ set(self.world.present))))
        return self._trial

    def close(self, trial: Mounted) -> None:
        if self._trial is not trial:
            raise ConflictError("this mutation was kept or undone already")
        self._trial = None

    def mounted(self) -> Tree:
        """The entries that really live, in the tree's order: disabled and failed ones, and users of those, are absent."""
        return Tree(tuple(self.world.present[entry.id] for entry in self.tree if entry.id in self.world.present))

    def failures(self) -> dict[str, str]:
        """Why entries of the tree do not live: their own error, or what they wait for."""
        return dict(self._failures())

    def _failures(self) -> Iterator[tuple[str, str]]:
        for name, node in self._loader.nodes.items():
            fiber = node.fiber
            if fiber is None or fiber.state is State.ACTIVE:
                continue
            if fiber.error is not None:
                yield name, f"{type(fiber.error).__name__}: {fiber.error}"
            else:
                missing = [service.removeprefix("entry:") for service in fiber.inject if fiber.ctx.get(service) is None]
                yield name, f"waits for {', '.join(missing)}"

    async def close_all(self) -> None:
        """Take everything down."""
        await self._context.dispose()

    def _plugin(self, kind: str) -> Plugin:
        return self._plugins[kind]

    def _make(self, kind: str) -> Plugin:
        def start(ctx: Context, wire: Any) -> Iterator[Any]:
            entry = parse_entry(wire)
            self.world.starts[entry.id] = self.world.starts.get(entry.id, 0) + 1
            if self._check is not None:
                self._check(entry)
            yield ctx.effect(lambda: self._enter(entry), f"{entry.kind} {entry.id}")
            yield ctx.provide(f"entry:{entry.id}", entry)

        return Plugin(kind, start)

    def _enter(self, entry: Entry) -> Callable[[], None]:
        self.world.present[entry.id] = entry

        def leave() -> None:
            del self.world.present[entry.id]

        return leave


def _options(entry: Entry) -> Options:
    needs = {f"entry:{other}": None for other in entry.config.get("uses", ())}
    return Options(name=entry.kind, id=entry.id, config=entry.wire(), disabled=bool(entry.config.get("disabled")), inject=needs)
