"""The drift watch over the real chain, log, publisher and gate; answers are scripted per release."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from reef_cli.config.schema import EvaluationSettings
from reef_cli.core.clock import SystemClock
from reef_cli.core.errors import EngineUnavailable, EvaluationError
from reef_cli.core.ids import RecordId, new_id
from reef_cli.core.ports import Answer
from reef_cli.core.types import Cadence, Inference, Operation, Release, Report
from reef_cli.evaluation import Suite
from reef_cli.evaluation.gate import Gate
from reef_cli.supervisor.drift import Drift
from tests.learning.world import SCENARIO
from tests.supervisor.test_publisher import Setting


class Clock(SystemClock):
    """Real time, moved on by hand."""

    ahead = 0.0

    def now(self) -> float:
        return super().now() + self.ahead

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead


class World:
    """Two releases, a suite of 40 items, and a script of which releases answer it right."""

    def __init__(self, setting: Setting, before: Release, head: Release) -> None:
        self.setting, self.before, self.head = setting, before, head
        self.clock = setting.publisher._clock = Clock()
        self.right = {before.content_id, head.content_id}
        self.asked: set[str] = set()
        self.down = False
        grader = {"kind": "contains", "all": ["right"]}
        items = [{"id": f"i{n}", "messages": [{"role": "user", "content": f"q{n}"}], "grader": grader} for n in range(40)]
        rows = "\n".join(map(json.dumps, items))
        path = setting.home / "suite.jsonl"
        path.write_text(rows)
        self.suite = Suite.load(str(path))

    async def answer(self, messages: object, sampling: object, release: Release | None) -> Answer:
        assert release is not None
        if self.down:
            raise EngineUnavailable("the engine is gone")
        self.asked.add(release.release_id)
        return Answer("right" if release.content_id in self.right else "wrong", 1, "stop")

    def drift(self, *, suite: bool = True, **settings: object) -> Drift:
        chosen = replace(EvaluationSettings(split="all", drift="rollback"), **settings)  # type: ignore[arg-type]
        gate = Gate(self, self.suite, chosen, cadence=Cadence.ROLLING) if suite else None
        log, releases, publisher = self.setting.log, self.setting.releases, self.setting.publisher
        return Drift(log, releases, publisher, gate, chosen, self.clock)

    async def session(self, release: Release, score: float) -> None:
        record = Inference(
            RecordId(new_id()), SCENARIO, self.clock.now(), "chat", "m", b"{}", [],
            {"role": "assistant", "content": "x"}, release_id=release.release_id, session=new_id(),
        )  # fmt: skip
        await self.setting.log.append(record)
        await self.setting.log.report(Report(RecordId(new_id()), SCENARIO, record.created_at, (record.id,), score))

    @property
    def served(self) -> Release:
        return self.setting.publisher.served(SCENARIO)

    def told(self) -> list[str]:
        return [event for event in self.setting.told() if event.startswith("drift")]


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    setting = Setting(tmp_path)
    await setting.log.scenarios.ensure(SCENARIO)
    await setting.publisher.open(SCENARIO)
    before, head = await setting.publish(gated=True), await setting.publish(gated=True)
    yield World(setting, before, head)
    setting.log.close()


async def test_on_its_cadence_a_sound_head_stays(world: World) -> None:
    drift = world.drift(drift_every_s=3600.0)
    await drift.look(SCENARIO)
    assert world.told() == [] and world.asked == set()
    world.clock.ahead = 3601.0
    await drift.look(SCENARIO)
    assert world.told() == ["drift_checked"] and world.asked == {world.before.release_id, world.head.release_id}
    await world.drift(drift_every_s=3600.0).look(SCENARIO)
    assert world.told() == ["drift_checked"], "a restart remembers when it looked"
    assert world.served.release_id == world.head.release_id


async def test_a_drifted_head_goes_back_with_the_numbers_and_not_again(world: World) -> None:
    drift = world.drift(drift_every_s=1.0)
    world.clock.ahead = 2.0
    world.right.discard(world.head.content_id)
    await drift.look(SCENARIO)
    back = world.served
    assert (back.operation, back.content_id, back.author) == (Operation.ROLLBACK, world.before.content_id, "reef: drift")
    assert back.parent_release_id == world.head.release_id and back.evidence["drift"]["verdict"]["current_mean"] == 1.0
    assert "shown worse" in back.evidence["reason"] and world.told() == ["drift_found"]
    world.clock.ahead = 4.0
    world.asked.clear()
    await drift.look(SCENARIO)
    assert world.head.release_id not in world.asked, "what it went back from is not its predecessor"
    assert world.served.release_id == back.release_id


async def test_without_leave_to_go_back_drift_is_only_said(world: World) -> None:
    world.clock.ahead = 2.0
    world.right.discard(world.head.content_id)
    await world.drift(drift="report", drift_every_s=1.0).look(SCENARIO)
    assert world.served.release_id == world.head.release_id and world.told() == ["drift_found"]


async def test_falling_live_scores_are_a_reason_to_look_but_do_not_decide(world: World) -> None:
    drift = world.drift(drift_every_s=None)
    for _ in range(30):
        await world.session(world.before, 1.0)
    for _ in range(30):
        await world.session(world.head, 1.0)
    await drift.look(SCENARIO)
    assert world.told() == []
    newer = await world.setting.publish()
    world.right.add(newer.content_id)
    for _ in range(30):
        await world.session(newer, 0.0)
    await drift.look(SCENARIO)
    assert world.told() == ["drift_checked"] and world.served.release_id == newer.release_id, "the suite sees no difference"
    await drift.look(SCENARIO)
    assert world.told() == ["drift_checked"], "only new sessions are a new reason"
    world.right.discard(newer.content_id)
    for _ in range(30):
        await world.session(newer, 0.0)
    await drift.look(SCENARIO)
    assert world.told() == ["drift_checked", "drift_found"] and world.served.content_id == world.head.content_id


async def test_without_a_suite_a_fall_is_said_once(world: World) -> None:
    drift = world.drift(suite=False)
    for release, score in ((world.before, 1.0), (world.head, 0.0)):
        for _ in range(30):
            await world.session(release, score)
    await drift.look(SCENARIO)
    await drift.look(SCENARIO)
    assert world.told() == ["drift_suspected"] and world.served.release_id == world.head.release_id


async def test_an_outage_decides_nothing(world: World) -> None:
    drift = world.drift(drift_every_s=1.0)
    world.clock.ahead, world.down = 2.0, True
    with pytest.raises((EvaluationError, EngineUnavailable)):
        await drift.look(SCENARIO)
    assert world.told() == [] and world.served.release_id == world.head.release_id


async def test_the_first_release_has_nothing_before_it(tmp_path: Path) -> None:
    setting = Setting(tmp_path)
    await setting.log.scenarios.ensure(SCENARIO)
    first = await setting.publisher.open(SCENARIO)
    world = World(setting, first, first)
    world.clock.ahead = 1e6
    await world.drift(drift_every_s=1.0).look(SCENARIO)
    assert world.told() == [] and world.asked == set()
    setting.log.close()
