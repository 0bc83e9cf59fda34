"""Reports a recipe derives itself: exchanges are shown once, again after a restart while needed; reports stored once."""

from pathlib import Path
from typing import Any

from reef_cli.core.ids import RecordId
from reef_cli.core.types import Report
from reef_cli.learning.contract import Seen, Tools, derived_id, is_derived
from reef_cli.learning.observing import Observing
from tests.learning.world import SCENARIO, PlainRecipe, World


class Judged(PlainRecipe):
    """The next exchange says whether the one before was good: the shape of learning from the next state."""

    made: list["Watcher"]

    def observer(self, scenario: str, tools: Tools) -> "Watcher":
        self.made = [*getattr(self, "made", []), Watcher(scenario, tools)]
        return self.made[-1]


class Watcher:
    def __init__(self, scenario: str, tools: Tools) -> None:
        self.scenario, self.tools = scenario, tools
        self.waiting: Seen | None = None
        self.seen: list[str] = []
        self.answers: list[bool] = []
        self.ticks = 0
        self.closed = False

    async def observe(self, seen: Seen) -> None:
        self.seen.append(seen.record.id)
        if self.waiting is not None:
            cited = self.waiting.record.id
            report = Report(derived_id("plain", [cited]), self.scenario, 2.0, (cited,), score=1.0)
            self.answers.append(await self.tools.report(report))
        self.waiting = seen

    async def tick(self, now: float) -> None:
        self.ticks += 1

    def pending(self) -> int | None:
        return self.waiting.sequence if self.waiting else None

    async def close(self) -> None:
        self.closed = True


def observing(world: World, recipe: Judged) -> Observing:
    return Observing(world.log, recipe, Tools())


def of(recipe: Judged) -> Watcher:
    return recipe.made[-1]


async def test_derived_reports_are_admitted_and_train(tmp_path: Path) -> None:
    recipe = Judged(PlainRecipe.settings_type(batch_size=2))
    world = await World(tmp_path, recipe=recipe).open()
    receipts = [await world.answer() for _ in range(3)]
    watching = observing(world, recipe)
    await watching.turn()
    await watching.turn()
    assert of(recipe).seen == receipts and of(recipe).answers == [True, True] and of(recipe).ticks == 2
    await world.step()
    assert world.states() == ["consumed", "consumed"]
    await world.close()


async def test_a_restart_shows_what_is_still_needed_and_stores_nothing_twice(tmp_path: Path) -> None:
    recipe = Judged(PlainRecipe.settings_type(batch_size=9))
    world = await World(tmp_path, recipe=recipe).open()
    receipts = [await world.answer() for _ in range(3)]
    await observing(world, recipe).turn()
    await world.close()
    await world.open()
    receipts.append(await world.answer())
    again = observing(world, recipe)
    await again.turn()
    assert of(recipe).seen == receipts[2:] and of(recipe).answers == [True]
    late = of(recipe)
    late.waiting = Seen(1, world.log.references([receipts[0]])[0], None, None, "turn")
    await world.answer()
    await again.turn()
    assert late.answers == [True, False]
    await world.close()


async def test_a_derived_id_is_recognised(tmp_path: Path) -> None:
    receipt = RecordId("0192aabbccdd7000800000000000abcd")
    mine = Report(derived_id("openclaw", [receipt]), SCENARIO, 0.0, (receipt,), score=1.0)
    assert is_derived("openclaw", mine) and not is_derived("sao", mine)
    assert mine.id.startswith(receipt[:12]) and len(mine.id) == 32


async def test_the_worker_observes_beside_its_turns(tmp_path: Path) -> None:
    import asyncio

    recipe = Judged(PlainRecipe.settings_type(batch_size=1))
    world = await World(tmp_path, recipe=recipe).open()
    for _ in range(2):
        await world.answer()
    running: Any = asyncio.create_task(world.worker.run())
    for _ in range(100):
        if world.states() == ["consumed"]:
            break
        await asyncio.sleep(0.05)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert world.states() == ["consumed"] and of(recipe).closed
    await world.close()
