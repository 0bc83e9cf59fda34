"""The road of a release through chain, engine and routing, over the real chain and log."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from reef_cli.core.clock import SystemClock
from reef_cli.core.errors import EngineError, EngineUnavailable, HeadMoved, ReleaseNotFound, ReleaseNotServable
from reef_cli.core.ids import ReleaseId
from reef_cli.core.types import Draft, Operation, Release, Surface
from reef_cli.experience.log import ExperienceLog
from reef_cli.releases.base import upstream_artifact
from reef_cli.releases.routing import EMPTY, HEAD, Policy
from reef_cli.releases.service import ReleaseService
from reef_cli.supervisor.publisher import KEEP_LOADED, Publisher, Staging
from tests.learning.world import SCENARIO, Adapters, write_adapter


class Engine(Adapters):
    """An engine that can refuse what comes from training."""

    full = False
    leaving = False

    async def load(self, release: Release, directory: Path | None) -> None:
        if self.away or self.leaving:
            raise EngineUnavailable("the engine is away")
        if self.full and release.operation is Operation.TRAINING:
            raise EngineError("no room for another adapter")
        await super().load(release, directory)


class Setting:
    """One home with its publisher and an engine that remembers what it holds."""

    def __init__(self, home: Path, apart: Staging | None = None) -> None:
        self.home = home
        self.log = ExperienceLog.open(home / "experience.db")
        self.releases = ReleaseService(home)
        self.engine = Engine()
        self.publisher = Publisher(
            log=self.log,
            releases=self.releases,
            base=upstream_artifact("http://u", "m"),
            clock=SystemClock(),
            serving=self.engine,  # type: ignore[arg-type]
            apart=apart,
        )
        self._marks = 0

    async def publish(self, *, gated: bool = False) -> Release:
        self._marks += 1
        folder = self.home / f"candidate{self._marks}"
        write_adapter(folder, self._marks)
        artifact = self.releases.store(folder, "lora")
        draft = Draft(artifact.content_id, "lora", Surface.WEIGHTS, Operation.TRAINING, "test", gated=gated)
        return await self.publisher.publish(SCENARIO, draft, self.publisher.served(SCENARIO).release_id)

    def told(self) -> list[str]:
        with self.log.read() as connection:
            return [row[0] for row in connection.execute("SELECT event FROM release_events ORDER BY seq")]


@pytest.fixture
async def setting(tmp_path: Path) -> AsyncIterator[Setting]:
    made = Setting(tmp_path)
    await made.log.scenarios.ensure(SCENARIO)
    await made.publisher.open(SCENARIO)
    yield made
    made.log.close()


async def test_a_release_is_served_once_it_is_loaded(setting: Setting) -> None:
    release = await setting.publish()
    assert setting.publisher.served(SCENARIO) == release and release.release_id in setting.engine.loaded
    assert setting.told() == ["served"]


async def test_a_release_that_cannot_be_loaded_is_taken_back_in_the_chain(setting: Setting) -> None:
    good = await setting.publish()
    setting.engine.full = True
    with pytest.raises(EngineError, match="rolled back"):
        await setting.publish()
    served, head = setting.publisher.served(SCENARIO), setting.releases.head(SCENARIO)
    assert head is not None and served.release_id == head.release_id
    assert head.operation is Operation.ROLLBACK and head.content_id == good.content_id
    assert setting.told() == ["served", "load_failed", "served"]


async def test_an_engine_that_is_away_gets_one_way_back_however_often_it_is_tried(setting: Setting) -> None:
    """Each look at the head used to add a rollback, one every two seconds until the engine came again."""
    good = await setting.publish()
    setting.engine.leaving = True
    with pytest.raises(EngineUnavailable):
        await setting.publish()
    head, known = setting.releases.head(SCENARIO), len(setting.releases.list(SCENARIO))
    assert head is not None and head.operation is Operation.ROLLBACK and head.content_id == good.content_id
    for _ in range(3):
        with pytest.raises(EngineUnavailable):
            await setting.publisher.follow(SCENARIO)
    assert setting.publisher.served(SCENARIO) == good and len(setting.releases.list(SCENARIO)) == known
    setting.engine.leaving = False
    assert await setting.publisher.follow(SCENARIO) == head == setting.releases.head(SCENARIO)


async def test_nothing_is_published_while_the_engine_is_away(setting: Setting) -> None:
    good = await setting.publish()
    setting.engine.away = True
    with pytest.raises(EngineUnavailable, match="away"):
        await setting.publish()
    assert setting.releases.head(SCENARIO) == good == setting.publisher.served(SCENARIO)
    setting.engine.away = False
    assert (await setting.publish()).parent_release_id == good.release_id


async def test_a_load_that_meets_no_engine_says_so(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    good = await setting.publish()
    load, calls = setting.publisher._bring, list[Release]()
    assert load is not None

    async def once(release: Release, directory: Path | None) -> None:
        calls.append(release)
        if len(calls) == 1:
            raise EngineUnavailable("it went")
        await load(release, directory)

    monkeypatch.setattr(setting.publisher, "_bring", once)
    with pytest.raises(EngineUnavailable, match="rolled back"):
        await setting.publish()
    assert setting.publisher.served(SCENARIO).content_id == good.content_id


async def test_a_stale_publisher_loses_and_nothing_changes(setting: Setting) -> None:
    first = setting.publisher.served(SCENARIO).release_id
    await setting.publish()
    served = setting.publisher.served(SCENARIO)
    folder = setting.home / "late"
    write_adapter(folder, 99)
    artifact = setting.releases.store(folder, "lora")
    draft = Draft(artifact.content_id, "lora", Surface.WEIGHTS, Operation.TRAINING, "late")
    with pytest.raises(HeadMoved):
        await setting.publisher.publish(SCENARIO, draft, first)
    assert setting.publisher.served(SCENARIO) == served


async def test_a_pin_is_loaded_when_asked_for_and_an_unknown_one_is_not_found(setting: Setting) -> None:
    releases = [await setting.publish() for _ in range(KEEP_LOADED + 3)]
    assert releases[0].release_id not in setting.engine.loaded
    pinned = await setting.publisher.resolve(SCENARIO, releases[0].release_id, None)
    assert pinned.release_id == releases[0].release_id and pinned.release_id in setting.engine.loaded
    with pytest.raises(ReleaseNotFound):
        await setting.publisher.resolve(SCENARIO, ReleaseId("r99-00000000"), None)


async def test_pins_do_not_fill_the_engine(setting: Setting) -> None:
    releases = [await setting.publish(gated=number == 0) for number in range(12)]
    for release in releases:
        await setting.publisher.resolve(SCENARIO, release.release_id, None)
    for task in list(setting.publisher._tasks):
        await task
    assert len([name for name in setting.engine.loaded if not name.startswith("r0-")]) <= KEEP_LOADED + 2


async def test_a_head_that_another_process_moved_is_followed(setting: Setting) -> None:
    await setting.publish()
    other = ReleaseService(setting.home)
    back = other.rollback(SCENARIO, author="another process")
    assert (await setting.publisher.follow(SCENARIO)).release_id == back.release_id
    assert setting.publisher.served(SCENARIO).release_id == back.release_id


async def test_an_engine_that_holds_one_release_refuses_pins_to_another(tmp_path: Path) -> None:
    class Apart:
        async def stage(self, candidate: Release, directory: Path | None) -> None: ...

        async def unstage(self, candidate: Release) -> None: ...

    setting = Setting(tmp_path, Apart())
    await setting.log.scenarios.ensure(SCENARIO)
    await setting.publisher.open(SCENARIO)
    first, _ = await setting.publish(), await setting.publish()
    setting.engine.loaded.discard(first.release_id)
    with pytest.raises(ReleaseNotServable):
        await setting.publisher.resolve(SCENARIO, first.release_id, None)
    setting.log.close()


# Routing


async def held(setting: Setting) -> Release:
    setting._marks += 1
    folder = setting.home / f"candidate{setting._marks}"
    write_adapter(folder, setting._marks)
    artifact = setting.releases.store(folder, "lora")
    draft = Draft(artifact.content_id, "lora", Surface.WEIGHTS, Operation.TRAINING, "test")
    return await setting.publisher.hold(SCENARIO, draft, setting.publisher.served(SCENARIO).release_id)


async def test_a_policy_loads_what_it_names_and_shares_out_sessions(setting: Setting) -> None:
    head, candidate = await setting.publish(), await held(setting)
    policy = Policy(shares={HEAD: 0.5, candidate.release_id: 0.5})
    assert not setting.publisher.routes.splits(SCENARIO)
    released = await setting.publisher.route(SCENARIO, policy, "none", "ann")
    assert candidate.release_id in setting.engine.loaded and setting.publisher.routes.splits(SCENARIO)
    got = {session: (await setting.publisher.resolve(SCENARIO, None, session)).release_id for session in map(str, range(40))}
    assert set(got.values()) == {head.release_id, candidate.release_id}
    again = {session: (await setting.publisher.resolve(SCENARIO, None, session)).release_id for session in got}
    assert again == got, "sticky"
    newer = await setting.publish()
    moved = {session: (await setting.publisher.resolve(SCENARIO, None, session)).release_id for session in got}
    assert moved == {name: newer.release_id if at == head.release_id else at for name, at in got.items()}
    with pytest.raises(HeadMoved):
        await setting.publisher.route(SCENARIO, EMPTY, "none", "bob")
    with pytest.raises(ReleaseNotServable, match="policy"):
        await setting.publisher.resolve(SCENARIO, released.release_id, None)
    assert "routed" in setting.told()


async def test_what_a_policy_names_stays_loaded(setting: Setting) -> None:
    first, candidate = await setting.publish(), await held(setting)
    policy = Policy(shares={HEAD: 0.5, first.release_id: 0.5}, shadow=candidate.release_id)
    await setting.publisher.route(SCENARIO, policy, None, "ann")
    for _ in range(KEEP_LOADED + 4):
        await setting.publish()
    await setting.publisher.unstage(candidate)
    for task in list(setting.publisher._tasks):
        await task
    assert {first.release_id, candidate.release_id} <= setting.engine.loaded
    await setting.publisher.route(SCENARIO, EMPTY, None, "ann")
    await setting.publish()
    for task in list(setting.publisher._tasks):
        await task
    assert first.release_id in setting.engine.loaded, "a request may still be on its way to it"
    for _ in range(KEEP_LOADED + 2):
        await setting.publish()
    for task in list(setting.publisher._tasks):
        await task
    assert not {first.release_id, candidate.release_id} & setting.engine.loaded


async def test_a_policy_that_cannot_be_served_changes_nothing(setting: Setting) -> None:
    await setting.publish()
    candidate = await held(setting)
    setting.engine.full = True
    with pytest.raises(EngineError):
        await setting.publisher.route(SCENARIO, Policy(pin=candidate.release_id), None, "ann")
    with pytest.raises(ReleaseNotFound):
        await setting.publisher.route(SCENARIO, Policy(pin=ReleaseId("r9-00000000")), None, "ann")
    assert setting.releases.list(SCENARIO, Surface.ROUTING) == []
    assert (await setting.publisher.resolve(SCENARIO, None, "x")).release_id == setting.publisher.served(SCENARIO).release_id


async def test_a_policy_set_by_another_process_is_followed_and_one_that_fails_leaves_the_head(setting: Setting) -> None:
    first, second = await setting.publish(), await setting.publish()
    ReleaseService(setting.home).route(SCENARIO, Policy(pin=first.release_id), author="offline")
    await setting.publisher.follow(SCENARIO)
    assert (await setting.publisher.resolve(SCENARIO, None, None)).release_id == first.release_id
    candidate = await held(setting)
    setting.engine.full = True
    ReleaseService(setting.home).route(SCENARIO, Policy(pin=candidate.release_id), author="offline")
    await setting.publisher.follow(SCENARIO)
    await setting.publisher.follow(SCENARIO)
    assert (await setting.publisher.resolve(SCENARIO, None, None)).release_id == second.release_id
    assert setting.publisher.routes.of(SCENARIO).fault is not None
    assert setting.told().count("routing_failed") == 1, "said once"
    setting.engine.full = False
    await setting.publisher.follow(SCENARIO)
    assert (await setting.publisher.resolve(SCENARIO, None, None)).release_id == candidate.release_id


async def test_one_release_at_a_time_takes_no_canary_and_no_shadow(tmp_path: Path) -> None:
    class Apart:
        async def stage(self, candidate: Release, directory: Path | None) -> None: ...

        async def unstage(self, candidate: Release) -> None: ...

    setting = Setting(tmp_path, Apart())
    await setting.log.scenarios.ensure(SCENARIO)
    await setting.publisher.open(SCENARIO)
    first, _ = await setting.publish(), await setting.publish()
    for policy in (
        Policy(shares={HEAD: 0.5, first.release_id: 0.5}),
        Policy(shadow=first.release_id),
        Policy(pin=first.release_id),
    ):
        with pytest.raises(ReleaseNotServable, match="beside the head") as refused:
            await setting.publisher.route(SCENARIO, policy, None, "ann")
        assert refused.value.code == "release_not_servable" and "weights" in refused.value.why
    assert (await setting.publisher.route(SCENARIO, EMPTY, None, "ann")).surface is Surface.ROUTING
    setting.log.close()
