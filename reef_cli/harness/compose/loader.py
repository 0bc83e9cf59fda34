"""The loader: a tree of entries by id, reconciled onto fibers.

An entry names a plugin and its config; a group holds entries. Loading a list creates, updates, moves and removes until what
runs is what the list says, touching nothing that did not change. A plugin that updates or disposes itself is written back.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from reef_cli.harness.compose.context import Context
from reef_cli.harness.compose.effect import ComposeError
from reef_cli.harness.compose.fiber import Fiber, Plugin


@dataclass(frozen=True, slots=True)
class Options:
    """What an entry should be. `isolate` maps a service to True (a realm of its own) or to a shared label."""

    name: str = ""
    id: str = ""
    config: Any = None
    disabled: bool = False
    inject: Mapping[str, Any] = field(default_factory=dict)
    isolate: Mapping[str, bool | str] = field(default_factory=dict)
    intercept: Mapping[str, Any] = field(default_factory=dict)
    children: tuple["Options", ...] | None = None
    """Set for groups only."""


class Node:
    """A live entry: its options, its context and, when enabled and no group, its fiber."""

    def __init__(self, options: Options, parent: "Node | None", ctx: Context) -> None:
        self.options = options
        self.parent = parent
        self.ctx = ctx
        self.fiber: Fiber | None = None
        self.children: list[Node] = []

    @property
    def enabled(self) -> bool:
        node: Node | None = self
        while node is not None:
            if node.options.disabled:
                return False
            node = node.parent
        return True


class Loader:
    """Owns the entries under one context. `resolve` turns an entry's name into a plugin."""

    def __init__(self, ctx: Context, resolve: Callable[[str], Plugin]) -> None:
        self.ctx = ctx
        self._resolve = resolve
        self._top = Node(Options(children=()), None, ctx.extend())
        self.nodes: dict[str, Node] = {}

    def options(self) -> tuple[Options, ...]:
        """The whole tree as it is now; loading it again changes nothing."""
        return self._options_of(self._top)

    def _options_of(self, node: Node) -> tuple[Options, ...]:
        return tuple(
            replace(child.options, children=self._options_of(child)) if child.options.children is not None else child.options
            for child in node.children
        )

    async def load(self, wanted: Sequence[Options]) -> None:
        """Make the world be `wanted`. Entries keep their fibers across groups; failures stay inside their entries."""
        wanted = tuple(self._named(item) for item in wanted)
        flat = list(_flatten(wanted))
        names = [item.id for item in flat]
        if len(set(names)) != len(names):
            raise ComposeError(f"two entries have the id {next(name for name in names if names.count(name) > 1)!r}")
        for name in [name for name in self.nodes if name not in set(names)]:
            if name in self.nodes:
                await self._remove(self.nodes[name], keep=set(names))
        await self._reconcile(self._top, wanted)
        await self._settle()

    async def create(self, options: Options, group: str | None = None) -> str:
        """Add one entry; returns its id."""
        options = self._named(options)
        if options.id in self.nodes:
            raise ComposeError(f"an entry {options.id!r} exists")
        parent = self._group(group)
        await self._put(parent, options, len(parent.children))
        await self._settle()
        return options.id

    async def update(self, entry_id: str, **patch: Any) -> None:
        """Change some of an entry's options; config is merged key by key and a None value deletes a key."""
        node = self._node(entry_id)
        config = patch.get("config")
        if isinstance(config, Mapping) and isinstance(node.options.config, Mapping):
            merged = {**node.options.config, **config}
            patch["config"] = {key: value for key, value in merged.items() if value is not None}
        await self._apply(node, replace(node.options, **patch))
        await self._settle()

    async def remove(self, entry_id: str) -> None:
        await self._remove(self._node(entry_id), keep=set())
        await self._settle()

    async def move(self, entry_id: str, group: str | None, index: int | None = None) -> None:
        """Put an entry into another group (None: the top); a fiber whose surroundings stay the same keeps running."""
        parent = self._group(group)
        node = self._node(entry_id)
        self._attach(node, parent, len(parent.children) if index is None else index)
        await self._apply(node, node.options)
        await self._settle()

    async def _settle(self) -> None:
        """Wait for rest; entries that failed on services which changed since get one more chance per change."""
        await self.ctx.settle()
        while any(node.fiber.retry() for node in list(self.nodes.values()) if node.fiber is not None):
            await self.ctx.settle()

    def _node(self, entry_id: str) -> Node:
        if entry_id not in self.nodes:
            raise ComposeError(f"no entry {entry_id!r}")
        return self.nodes[entry_id]

    def _group(self, group: str | None) -> Node:
        node = self._top if group is None else self._node(group)
        if node.options.children is None:
            raise ComposeError(f"the entry {group!r} is no group")
        return node

    def _named(self, options: Options) -> Options:
        name = options.id
        while not name or (not options.id and name in self.nodes):
            name = secrets.token_hex(4)
        children = options.children
        return replace(options, id=name, children=None if children is None else tuple(self._named(child) for child in children))

    async def _reconcile(self, parent: Node, wanted: Sequence[Options]) -> None:
        for index, options in enumerate(wanted):
            await self._put(parent, options, index)

    async def _put(self, parent: Node, options: Options, index: int) -> None:
        node = self.nodes.get(options.id)
        if node is not None and (node.options.children is None) != (options.children is None):
            await self._remove(node, keep=set())
            node = None
        if node is None:
            node = Node(replace(options, disabled=True), parent, parent.ctx.extend())
            self.nodes[options.id] = node
            parent.children.insert(index, node)
        else:
            self._attach(node, parent, index)
        await self._apply(node, options)
        if options.children is not None:
            await self._reconcile(node, options.children)

    def _attach(self, node: Node, parent: Node, index: int) -> None:
        if node.parent is not None:
            node.parent.children.remove(node)
        parent.children.insert(min(index, len(parent.children)), node)
        moved = node.parent is not parent
        node.parent, node.ctx.parent = parent, parent.ctx
        if moved:
            self.ctx.rekey()

    async def _apply(self, node: Node, options: Options) -> None:
        old, node.options = node.options, options
        self._patch_context(node)
        if options.children is not None:
            for child in node.children:
                await self._apply(child, child.options)
            return
        if not node.enabled:
            await self._stop(node)
        elif node.fiber is None or (old.name, old.inject) != (options.name, options.inject):
            await self._stop(node)
            self._start(node)
        elif old.config != options.config:
            await self._change(node.fiber, options.config)

    async def _change(self, fiber: Fiber, config: Any) -> None:
        try:
            await fiber.update(config, from_loader=True)
        except Exception as error:  # a schema is foreign code: the entry fails, its siblings go on
            fiber.complain(error)
            fiber.reset(config)
            await fiber.settle()

    def _patch_context(self, node: Node) -> None:
        realms = {
            name: f"#{node.options.id}" if value is True else f"@{value}"
            for name, value in node.options.isolate.items()
            if value
        }
        if realms != node.ctx.realms:
            node.ctx.realms = realms
            self.ctx.rekey()
        if dict(node.options.intercept) != node.ctx.layers:
            node.ctx.layers = dict(node.options.intercept)
            for fiber in self.ctx.fibers():
                fiber.refresh()

    def _start(self, node: Node) -> None:
        plugin = self._resolve(node.options.name)
        if node.options.inject:
            plugin = replace(plugin, inject={**plugin.inject, **node.options.inject})
        fiber = node.ctx.plugin(plugin, node.options.config)
        node.fiber = fiber

        def updated(config: Any) -> None:
            node.options = replace(node.options, config=config)

        def disposed() -> None:
            node.options = replace(node.options, disabled=True)
            node.fiber = None

        fiber.on_self_update, fiber.on_self_dispose = updated, disposed

    async def _stop(self, node: Node) -> None:
        if node.fiber is not None:
            fiber, node.fiber = node.fiber, None
            await fiber.dispose(from_loader=True)

    async def _remove(self, node: Node, keep: set[str]) -> None:
        for child in reversed(node.children[:]):
            if child.options.id in keep:
                self._attach(child, self._top, len(self._top.children))
            else:
                await self._remove(child, keep)
        await self._stop(node)
        if node.parent is not None:
            node.parent.children.remove(node)
        del self.nodes[node.options.id]


def _flatten(items: Sequence[Options]) -> list[Options]:
    return [found for item in items for found in (item, *_flatten(item.children or ()))]
