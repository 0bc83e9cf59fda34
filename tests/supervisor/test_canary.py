"""A canary and its reports, over the real chain, log and publisher; only the engine remembers instead of generating."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from reef_cli.core.clock import SystemClock
from reef_cli.core.errors import EngineError
from reef_cli.core.ids import RecordId, new_id
from reef_cli.core.types import Inference, Operation, Release, Report, Surface
from reef_cli.releases.routing import EMPTY, HEAD, Auto, Policy
from reef_cli.supervisor.canary import Canaries
from reef_cli.supervisor.publisher import Publisher
from tests.learning.world import SCENARIO
from tests.supervisor.test_publisher import Setting, held


class Trial:
    """A home with a head, a held canary at half of the sessions, and clients who report."""

    def __init__(self, setting: Setting, head: Release, canary: Release) -> None:
        self.setting, self.head, self.canary = setting, head, canary
        self.canaries = Canaries(setting.log, setting.publisher)
        self.number = 0

    async def session(self, good: set[str], pin: Release | None = None, name: str | None = None) -> str:
        """One session with one scored answer: 1 by releases in `good`, else 0. The release that answered."""
        self.number += 1
        session = name or f"session {self.number}"
        release = pin or await self.setting.publisher.resolve(SCENARIO, None, session)
        record = Inference(
            RecordId(new_id()), SCENARIO, self.setting.releases._clock.now(), "chat", "m", b"{}", [],
            {"role": "assistant", "content": "x"}, release_id=release.release_id, session=session,
        )  # fmt: skip
        await self.setting.log.append(record)
        score = 1.0 if release.release_id in good else 0.0
        await self.setting.log.report(Report(RecordId(new_id()), SCENARIO, record.created_at, (record.id,), score))
        return release.release_id

    async def look(self) -> None:
        await self.canaries.look(SCENARIO)

    @property
    def policy(self) -> Policy:
        return self.setting.releases.policy(self.routing)

    @property
    def routing(self) -> Release:
        release = self.setting.releases.head(SCENARIO, Surface.ROUTING)
        assert release is not None
        return release


@pytest.fixture
async def trial(tmp_path: Path) -> AsyncIterator[Trial]:
    setting = Setting(tmp_path)
    await setting.log.scenarios.ensure(SCENARIO)
    await setting.publisher.open(SCENARIO)
    head, canary = await setting.publish(), await held(setting)
    policy = Policy(shares={HEAD: 0.5, canary.release_id: 0.5}, shadow=head.release_id, auto=Auto())
    await setting.publisher.route(SCENARIO, policy, None, "ann")
    yield Trial(setting, head, canary)
    setting.log.close()


async def test_a_worse_canary_is_taken_back(trial: Trial) -> None:
    for _ in range(40):
        await trial.session({trial.head.release_id})
        await trial.look()
    assert trial.policy == Policy(shadow=trial.head.release_id), "the rest of the policy stands"
    back = trial.routing
    assert (back.operation, back.author) == (Operation.ROLLBACK, "reef: canary")
    assert "shown worse" in back.evidence["reason"] and back.evidence["candidate_mean"] == 0.0
    assert trial.setting.publisher.served(SCENARIO).release_id == trial.head.release_id
    assert trial.setting.releases.get(SCENARIO, trial.canary.release_id).pending, "a person may still look at it"
    assert {await trial.session(set()) for _ in range(20)} == {trial.head.release_id}
    assert trial.setting.told()[-1] == "canary_returned"


async def test_a_better_canary_becomes_the_head(trial: Trial) -> None:
    for _ in range(40):
        await trial.session({trial.canary.release_id})
    await trial.look()
    head = trial.setting.publisher.served(SCENARIO)
    assert (head.operation, head.content_id, head.source_release_id) == (
        Operation.PROMOTE, trial.canary.content_id, trial.canary.release_id,
    )  # fmt: skip
    assert head.evidence["canary"]["against"] == trial.head.release_id and head.parent_release_id == trial.head.release_id
    assert trial.routing.operation is Operation.PROMOTE and trial.policy.shares == {}
    assert trial.setting.told()[-2:] == ["served", "canary_promoted"]


async def test_an_equal_canary_stays(trial: Trial) -> None:
    for number in range(60):
        await trial.session({trial.head.release_id, trial.canary.release_id} if number % 2 else set())
    await trial.look()
    assert trial.policy.canary == trial.canary.release_id
    view = trial.canaries.view(SCENARIO)
    assert view is not None and view["reason"] == "undecided" and sum(view["sessions"].values()) == 60


async def test_a_session_counts_once_and_a_pinned_request_not_at_all(trial: Trial) -> None:
    for _ in range(30):
        await trial.session({trial.head.release_id}, name="one and the same")
        await trial.session({trial.head.release_id}, pin=trial.canary, name="s0")
        await trial.session({trial.head.release_id}, pin=trial.head, name="s1")
    await trial.look()
    view = trial.canaries.view(SCENARIO)
    assert view is not None and sum(view["sessions"].values()) <= 3


async def test_a_restart_comes_to_the_same_numbers(trial: Trial) -> None:
    for number in range(20):
        await trial.session({trial.head.release_id} if number % 3 else {trial.canary.release_id})
        await trial.look()
    fresh = Canaries(trial.setting.log, trial.setting.publisher)
    await fresh.look(SCENARIO)
    assert fresh.view(SCENARIO) == trial.canaries.view(SCENARIO)


async def test_a_new_head_begins_the_comparison_anew_but_safety_goes_on(trial: Trial) -> None:
    for _ in range(4):
        await trial.session({trial.canary.release_id})
    await trial.look()
    newer = await trial.setting.publish()
    await trial.look()
    view = trial.canaries.view(SCENARIO)
    assert view is not None and view["against"] == newer.release_id and sum(view["sessions"].values()) == 0
    for _ in range(60):
        await trial.session({newer.release_id})
    await trial.look()
    assert trial.policy.shares == {}, "worse than all others together"


async def test_a_canary_promoted_by_hand_ends_its_policy(trial: Trial) -> None:
    await trial.setting.publisher.promote(SCENARIO, trial.canary.release_id, None, "ann")
    await trial.look()
    assert trial.policy.shares == {} and trial.routing.evidence["reason"] == "the canary was promoted"


async def test_a_crash_between_promotion_and_policy_is_made_good_also_under_a_newer_head(trial: Trial) -> None:
    setting = trial.setting
    setting.releases.promote(SCENARIO, trial.canary.release_id)
    await setting.publisher.follow(SCENARIO)
    newer = await setting.publish()
    fresh = Publisher(
        log=setting.log, releases=setting.releases, base=setting.publisher._base, clock=SystemClock(), serving=setting.engine,  # type: ignore[arg-type]
    )  # fmt: skip
    await fresh.open(SCENARIO)
    await Canaries(setting.log, fresh).look(SCENARIO)
    assert trial.policy.shares == {} and fresh.served(SCENARIO).release_id == newer.release_id


async def test_a_policy_set_meanwhile_wins(trial: Trial) -> None:
    for _ in range(40):
        await trial.session({trial.head.release_id})
    trial.setting.releases.route(SCENARIO, EMPTY, author="another process")
    await trial.look()
    assert trial.routing.author == "another process"


async def test_a_canary_that_cannot_become_the_head_is_said_once(trial: Trial) -> None:
    async def refuse(*_: object) -> Release:
        raise EngineError("no room")

    trial.setting.publisher.promote = refuse  # type: ignore[method-assign]
    for _ in range(40):
        await trial.session({trial.canary.release_id})
    await trial.look()
    await trial.look()
    view = trial.canaries.view(SCENARIO)
    assert view is not None and "no room" in view["reason"] and trial.policy.canary is not None
