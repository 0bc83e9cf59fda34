"""The road of a release through chain, engine and routing, over the real chain and log."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from reef_cli.core.clock import SystemClock
from reef_cli.core.errors import EngineError, HeadMoved, ReleaseNotFound, ReleaseNotServable
from reef_cli.core.ids import ReleaseId
from reef_cli.core.types import Draft, Operation, Release, Surface
from reef_cli.experience.log import ExperienceLog
from reef_cli.releases.base import upstream_artifact
from reef_cli.releases.service import ReleaseService
from reef_cli.supervisor.publisher import KEEP_LOADED, Publisher, Staging
from tests.learning.world import SCENARIO, Adapters, write_adapter


class Engine(Adapters):
    """An engine that can refuse what comes from training."""

    full = False

    async def load(self, release: Release, directory: Path | None) -> None:
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
