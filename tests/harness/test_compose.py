"""The compose engine against the behaviour of Cordis: effects, fibers, services, isolation, loader."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reef_cli.harness.compose import Context, Loader, Options, Plugin, State
from reef_cli.harness.compose.effect import ComposeError


def pusher(log: list[Any], value: Any) -> Callable[[], None]:
    return lambda: log.append(value)


async def test_effect_disposes_once_and_in_reverse() -> None:
    ctx, log = Context(), []

    def three() -> Any:
        for value in (1, 2, 3):
            yield pusher(log, value)

    effect = ctx.effect(three)
    await asyncio.gather(effect.dispose(), effect.dispose())
    await effect.dispose()
    assert log == [3, 2, 1] and effect.disposed and ctx.fiber.effects == []


async def test_error_midway_unwinds_and_raises() -> None:
    ctx, log = Context(), []

    def broken() -> Any:
        yield pusher(log, 1)
        yield pusher(log, 2)
        raise ValueError("no")

    with pytest.raises(ValueError):
        ctx.effect(broken)
    assert log == [2, 1] and ctx.fiber.effects == []


async def async_steps(log: list[Any], gate: asyncio.Event) -> Any:
    log.append(1)
    yield pusher(log, 2)
    await gate.wait()
    log.append(3)
    yield pusher(log, 4)
    log.append(5)
    yield pusher(log, 6)


@pytest.mark.parametrize(("open_first", "expected"), [(True, [1, 3, 5, 6, 4, 2]), (False, [1, 3, 4, 2])])
async def test_async_effect_whole_and_aborted(open_first: bool, expected: list[int]) -> None:
    ctx, log, gate = Context(), [], asyncio.Event()
    effect = ctx.effect(lambda: async_steps(log, gate))
    await asyncio.sleep(0)
    if open_first:
        gate.set()
        await effect
    closing = asyncio.create_task(effect.dispose())
    await asyncio.sleep(0)
    gate.set()
    await closing
    assert log == expected


async def test_async_effect_error_unwinds_and_is_raised_once() -> None:
    ctx, log = Context(), []

    async def broken() -> Any:
        yield pusher(log, 1)
        raise ValueError("no")

    with pytest.raises(ValueError):
        await ctx.effect(broken)
    assert log == [1] and ctx.complaints == []
    ctx.effect(broken)
    await asyncio.sleep(0.01)
    assert [type(error) for _, error in ctx.complaints] == [ValueError]


async def test_teardown_is_sequential() -> None:
    ctx, log = Context(), []

    def plugin(inner: Context, _: Any) -> None:
        for name, delay in (("a", 0.0), ("b", 0.01)):

            async def undo(name: str = name, delay: float = delay) -> None:
                log.append(f"{name} starts")
                await asyncio.sleep(delay)
                log.append(f"{name} ends")

            inner.effect(lambda undo=undo: undo)

    await (await ctx.plugin(plugin).settle()).dispose()
    assert log == ["b starts", "b ends", "a starts", "a ends"]


async def test_nested_effects_form_a_labelled_tree() -> None:
    ctx, log = Context(), []

    def outer() -> Any:
        yield ctx.effect(lambda: pusher(log, "inner"), "inner")
        yield pusher(log, "own")

    effect = ctx.effect(outer, "outer")
    assert [item.tree() for item in ctx.fiber.effects] == [{"label": "outer", "children": [{"label": "inner", "children": []}]}]
    await effect.dispose()
    assert log == ["own", "inner"]


async def test_plugin_error_leaves_siblings_alone_and_only_update_clears_it() -> None:
    ctx, runs = Context(), []

    def picky(_: Context, config: Any) -> Any:
        runs.append(config)
        if config == "bad":
            raise ValueError("bad config")
        return pusher(runs, "gone")

    bad, good = ctx.plugin(picky, "bad"), ctx.plugin(picky, "good")
    await ctx.settle()
    assert (bad.state, good.state) == (State.FAILED, State.ACTIVE) and isinstance(bad.error, ValueError)
    await bad.restart()
    assert bad.state is State.FAILED
    with pytest.raises(ComposeError, match="inactive context"):
        bad.ctx.effect(lambda: None)
    await bad.update("fine")
    assert bad.state is State.ACTIVE and runs == ["bad", "good", "fine"]


async def test_dispose_error_is_logged_once_and_does_not_stop_the_rest() -> None:
    ctx, log = Context(), []

    def plugin(inner: Context, _: Any) -> Any:
        def boom() -> None:
            raise ValueError("boom")

        yield pusher(log, "first")
        yield boom

    await (await ctx.plugin(plugin).settle()).dispose()
    assert log == ["first"] and len(ctx.complaints) == 1


async def test_schema_refuses_before_anything_runs() -> None:
    ctx, runs = Context(), []
    plugin = Plugin("p", lambda c, config: runs.append(config), schema=int)
    bad = await ctx.plugin(plugin, "x").settle()
    assert bad.state is State.FAILED and runs == []
    good = await ctx.plugin(plugin, "7").settle()
    with pytest.raises(ValueError):
        await good.update("y")
    assert good.state is State.ACTIVE and runs == [7]


def provider(name: str, value: Any) -> Plugin:
    return Plugin(f"provider of {name}", lambda ctx, _: ctx.provide(name, value))


async def test_replacing_a_provider_restarts_consumers_once_and_removing_unloads() -> None:
    ctx, log = Context(), []

    def consume(inner: Context, _: Any) -> Any:
        log.append(inner.need("db"))
        return pusher(log, "down")

    consumer = ctx.plugin(Plugin("consumer", consume, {"db": None}))
    await ctx.settle()
    assert consumer.state is State.PENDING and consumer.epoch is None
    first = ctx.plugin(provider("db", 1))
    await ctx.settle()
    assert log == [1] and consumer.epoch == f":{first.uid}"
    await first.dispose()
    ctx.plugin(provider("db", 2))
    await ctx.settle()
    assert log == [1, "down", 2]
    await ctx.dispose()
    assert log[-1] == "down" and not ctx.services and not ctx.fibers() and not ctx.events.listeners


async def test_consumers_are_down_before_the_provider_lets_go() -> None:
    ctx, log = Context(), []

    def provide(inner: Context, _: Any) -> Any:
        yield pusher(log, "provider's resource gone")
        yield inner.provide("db", object())

    async def consume(inner: Context, _: Any) -> Any:
        async def down() -> None:
            await asyncio.sleep(0.01)
            log.append("consumer down")

        yield down

    held = ctx.plugin(Plugin("p", provide))
    ctx.plugin(Plugin("c", consume, {"db": None}))
    await ctx.settle()
    await held.dispose()
    assert log == ["consumer down", "provider's resource gone"]


async def test_service_access_rules() -> None:
    ctx = Context()
    first = await ctx.plugin(provider("x", 1)).settle()
    with pytest.raises(ComposeError, match='"x" has been registered at'):
        ctx.provide("x", 2)
    with pytest.raises(ComposeError, match="in multiple fibers"):
        ctx.set("x", 3)
    with pytest.raises(ComposeError, match="without provide"):
        ctx.set("y", 3)
    with pytest.raises(ComposeError, match="without inject"):
        ctx.need("x")
    first.ctx.set("x", 5)
    assert ctx.get("x") == 5
    waiting = ctx.inject(["z"], lambda inner: None)
    with pytest.raises(ComposeError, match="in inactive context"):
        waiting.ctx.need("z")


async def test_isolation_and_shared_realms() -> None:
    ctx = Context()
    one, two, other = ctx.isolate("s", "shared"), ctx.isolate("s", "shared"), ctx.isolate("s")
    for place, value in ((ctx, "root"), (one, "shared"), (other, "own")):
        place.plugin(provider("s", value))
    await ctx.settle()
    assert [place.get("s") for place in (ctx, one, two, other)] == ["root", "shared", "shared", "own"]


async def test_layers_merge_from_the_outside() -> None:
    ctx = Context().intercept("s", {"a": 1, "b": 1}).intercept("s", {"b": 2})
    assert ctx.layered("s", {"a": 0, "c": 0}) == {"a": 1, "b": 2, "c": 0}


async def test_inertia_changes_during_a_transition_are_seen_at_its_end() -> None:
    ctx, log, gate = Context(), [], asyncio.Event()

    async def slow(inner: Context, config: Any) -> Any:
        log.append(f"load {config}")
        await gate.wait()
        yield pusher(log, f"unload {config}")

    fiber = ctx.plugin(slow, 1)
    await asyncio.sleep(0)
    pending = [asyncio.create_task(fiber.update(value)) for value in (2, 3)]
    await asyncio.sleep(0.01)
    assert log == ["load 1"]
    gate.set()
    await asyncio.gather(*pending)
    assert log == ["load 1", "unload 1", "load 3"] and fiber.state is State.ACTIVE


async def test_events_five_ways() -> None:
    ctx, log = Context(), []
    ctx.on("e", lambda: log.append("late"))
    first = ctx.on("e", lambda: log.append("early"), prepend=True)
    ctx.on("e", lambda: log.append("once"), once=True)
    ctx.emit("e")
    ctx.emit("e")
    assert log == ["early", "late", "once", "early", "late"]
    await first.dispose()
    ctx.on("v", lambda: None)
    ctx.on("v", lambda: 7)
    ctx.on("v", lambda: pytest.fail("not reached"))
    assert ctx.events.bail("v") == 7 and await ctx.events.serial("v") == 7
    ctx.on("w", lambda value, onward: value + onward())
    assert ctx.waterfall("w", 1, fallback=lambda: 10) == 11
    ctx.on("bad", lambda: 1 / 0)
    ctx.emit("bad")
    assert len(ctx.complaints) == 1
    with pytest.raises(ExceptionGroup):
        await ctx.events.parallel("bad")


class Site:
    """A world the loader's plugins change, with counts of starts."""

    def __init__(self) -> None:
        self.ctx = Context()
        self.present: dict[str, Any] = {}
        self.starts: list[Any] = []
        self.loader = Loader(self.ctx, lambda name: Plugin(name, self.apply, schema=self.check))

    @staticmethod
    def check(config: Any) -> Any:
        if config == -1:
            raise ValueError("negative")
        return config

    def apply(self, ctx: Context, config: Any) -> Any:
        self.starts.append(config)
        key = f"{ctx.fiber.name}"
        self.present[key] = config

        def undo() -> None:
            del self.present[key]

        yield undo
        yield ctx.provide(ctx.fiber.name, config)
        if config == -2:
            raise ValueError("midway")


async def test_loader_touches_only_what_changed() -> None:
    site = Site()
    await site.loader.load([Options("a", "a", 1), Options("b", "b", 2), Options("c", "c", 3, inject={"b": None})])
    assert site.present == {"a": 1, "b": 2, "c": 3}
    site.starts.clear()
    await site.loader.update("b", config=9)
    assert site.present == {"a": 1, "b": 9, "c": 3} and site.starts == [9, 3]
    site.starts.clear()
    await site.loader.load(site.loader.options())
    assert site.starts == []
    await site.loader.remove("b")
    assert site.present == {"a": 1}


async def test_groups_disable_transfer_and_isolate() -> None:
    site = Site()
    await site.loader.load(
        [Options(id="g", children=(Options("a", "a", 1),)), Options(id="h", children=()), Options("b", "b", 2)]
    )
    fiber = site.loader.nodes["a"].fiber
    await site.loader.move("a", "h")
    assert site.loader.nodes["a"].fiber is fiber and site.starts == [1, 2]
    await site.loader.update("h", disabled=True)
    assert site.present == {"b": 2}
    await site.loader.update("h", disabled=False)
    assert site.present == {"a": 1, "b": 2}
    await site.loader.load([Options("a", "a", 1, isolate={"a": True}), Options("d", "d", 4, inject={"a": None})])
    assert "d" not in site.present
    await site.loader.load([Options("a", "a", 1), Options("d", "d", 4, inject={"a": None})])
    assert site.present == {"a": 1, "d": 4}
    with pytest.raises(ComposeError):
        await site.loader.load([Options("a", "x"), Options("b", "x")])


async def test_self_update_and_self_dispose_are_written_back() -> None:
    site = Site()
    await site.loader.load([Options("a", "a", 1), Options("b", "b", 1)])
    await site.loader.nodes["a"].fiber.update(5)
    await site.loader.nodes["b"].fiber.dispose()
    assert [(item.id, item.config, item.disabled) for item in site.loader.options()] == [("a", 5, False), ("b", 1, True)]
    assert len(await site.loader.create(Options("c"))) == 8


CONFIG = st.sampled_from([-2, -1, 1, 2, 3])


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Options, ...]:
    names = draw(st.permutations(["a", "b", "c", "d"]))[: draw(st.integers(0, 4))]
    grouped = draw(st.booleans())
    items = tuple(
        Options(
            name,
            name,
            draw(CONFIG),
            draw(st.booleans()) and draw(st.booleans()),
            dict.fromkeys(
                draw(st.lists(st.sampled_from([other for other in "abcd" if other < name] or [name]), unique=True, max_size=2))
                if name != "a"
                else []
            ),
            {"b": draw(st.sampled_from([True, "x"]))} if draw(st.integers(0, 5)) == 0 else {},
        )
        for name in names
    )
    return (Options(id="g", children=items[:2], disabled=draw(st.integers(0, 4)) == 0), *items[2:]) if grouped else items


def picture(site: Site) -> Any:
    fibers = sorted((fiber.name, fiber.state.value, len(fiber.effects)) for fiber in site.ctx.fibers())
    return site.present, fibers, sorted(site.ctx.services), sorted(site.loader.nodes), site.loader.options()


@settings(max_examples=150, deadline=None)
@given(st.lists(worlds(), min_size=1, max_size=5))
def test_any_road_leads_to_the_world_of_the_last_tree(road: list[tuple[Options, ...]]) -> None:
    async def run() -> None:
        travelled, fresh = Site(), Site()
        for stop in road:
            await travelled.loader.load(stop)
        await fresh.loader.load(road[-1])
        assert picture(travelled) == picture(fresh)
        await travelled.ctx.dispose()
        assert (
            not travelled.present
            and not travelled.ctx.services
            and not travelled.ctx.fibers()
            and not travelled.ctx.fiber.effects
        )

    asyncio.run(run())
