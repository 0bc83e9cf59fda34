"""Jobs driven over the real log and chain: what is published, what is kept back, and what a crash leaves behind."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reef_cli.core.errors import EngineUnavailable, HeadMoved
from reef_cli.core.types import Cadence, Draft, JobState, Operation, Outcome, Release, Surface, Verdict
from reef_cli.learning.cadence import Policy
from tests.learning.world import SCENARIO, Adapters, World

ROLLING = Policy(Cadence.ROLLING, review=False, gate_every=2)


async def test_a_selected_step_becomes_the_head_with_its_evidence(world: World) -> None:
    reports = [await world.exchange(1.0), await world.exchange(0.0)]
    await world.step()
    head = world.releases.head(SCENARIO)
    assert head is not None and head.operation is Operation.TRAINING and head.gated
    assert head.evidence["metrics"]["reward_mean"] == 0.5
    assert head.evidence["consumed"] == [report.id for report in reports]
    assert world.publisher.served(SCENARIO).release_id == head.release_id
    assert world.states() == ["consumed", "consumed"]


async def test_a_rejected_step_changes_nothing_that_is_served(world: World) -> None:
    before = world.publisher.served(SCENARIO)
    world.judge.gates = [Outcome.REJECT]
    await world.exchange(), await world.exchange()
    await world.step()
    assert world.publisher.served(SCENARIO) == before
    assert [release.release_id for release in world.releases.list(SCENARIO)] == [before.release_id]
    assert world.jobs() == [("settled", "reject", "gate")] and world.states() == ["consumed", "consumed"]


async def test_winners_wait_for_a_person_under_review(tmp_path: Path) -> None:
    world = await World(tmp_path, policy=Policy(Cadence.GATED, review=True, gate_every=3)).open()
    await world.exchange(), await world.exchange()
    await world.step()
    held = [release for release in world.releases.list(SCENARIO) if release.pending]
    assert len(held) == 1 and world.publisher.served(SCENARIO).step == 0
    promoted = await world.publisher.promote(SCENARIO, held[0].release_id, None, "me")
    assert promoted.content_id == held[0].content_id and world.publisher.served(SCENARIO) == promoted
    await world.close()


async def test_each_step_starts_from_the_state_of_the_head(world: World) -> None:
    world.judge.gates = [Outcome.SELECT, Outcome.REJECT, Outcome.SELECT]
    for _ in range(3):
        await world.exchange(), await world.exchange()
        await world.step()
    # The rejected step's state is not used: the third starts again from the first's.
    assert [start for start, _ in world.trainer.steps] == [None, "state 1", "state 1"]


async def test_a_step_that_leaves_the_policy_alone_publishes_nothing_but_keeps_its_state(world: World) -> None:
    world.trainer.updates = False
    await world.exchange(), await world.exchange()
    await world.step()
    assert world.jobs() == [("settled", "unchanged", "the policy was not updated")]
    world.trainer.updates = True
    await world.exchange(), await world.exchange()
    await world.step()
    assert [start for start, _ in world.trainer.steps] == [None, "state 1"]
    assert world.publisher.served(SCENARIO).step == 1


async def test_a_broken_step_returns_its_samples_and_gives_up_on_them_in_the_end(world: World) -> None:
    world.trainer.fault = "CUDA said no"
    await world.exchange(), await world.exchange()
    for _ in range(4):
        await world.step()
    assert world.states() == ["dropped", "dropped"] and set(world.reasons()) == {"failed_repeatedly"}
    assert [state for state, _, _ in world.jobs()] == ["failed"] * 3
    assert "CUDA said no" in str(world.jobs()[0][2])


async def test_a_scenario_rests_after_a_failure_and_longer_after_each(world: World) -> None:
    world.trainer.fault = "still broken"
    await world.exchange(), await world.exchange()
    await world.step()
    await world.worker._turn()
    assert len(world.jobs()) == 1
    first = world.worker._resting[SCENARIO, "plain"]
    await world.step()
    assert len(world.jobs()) == 2 and world.worker._resting[SCENARIO, "plain"] > first + 0.5
    world.worker.request_step(SCENARIO)
    assert not world.worker._rests((SCENARIO, "plain"))


async def test_a_head_that_moved_meanwhile_loses_nothing(world: World) -> None:
    original = world.trainer.train

    async def train_while_somebody_rolls_back(*args: Any, **kwargs: Any) -> Any:
        candidate = await original(*args, **kwargs)
        if len(world.trainer.steps) == 1:
            await world.publisher.rollback(SCENARIO, world.publisher.served(SCENARIO).release_id, None, "me")
        return candidate

    world.trainer.train = train_while_somebody_rolls_back  # type: ignore[method-assign]
    await world.exchange(), await world.exchange()
    await world.step()
    assert world.jobs()[0][0] == "failed" and str(world.jobs()[0][2]).startswith(HeadMoved.code)
    assert world.states() == ["queued", "queued"]
    await world.step()
    assert world.states() == ["consumed", "consumed"] and world.publisher.served(SCENARIO).operation is Operation.TRAINING


async def test_stale_samples_are_dropped_alone_and_by_name(tmp_path: Path) -> None:
    world = await World(tmp_path, max_staleness=1).open()
    start = world.publisher.served(SCENARIO)
    for _ in range(2):
        await world.exchange(), await world.exchange()
        await world.step()
    await world.exchange(release=start), await world.exchange()
    await world.step()
    assert world.states()[-2:] == ["dropped", "queued"]
    assert world.reasons()[-2] == "stale: 2 releases old, 1 allowed"
    await world.close()


async def test_what_a_held_release_answered_trains_also_after_its_promotion(tmp_path: Path) -> None:
    world = await World(tmp_path, policy=Policy(Cadence.GATED, review=True, gate_every=3)).open()
    await world.exchange(), await world.exchange()
    await world.step()
    (held,) = [release for release in world.releases.list(SCENARIO) if release.pending]
    await world.exchange(release=held)  # as a canary
    await world.publisher.promote(SCENARIO, held.release_id, None, "me")
    await world.exchange(release=held)
    await world.step()
    assert world.states() == ["consumed"] * 4
    await world.close()


async def test_refusals_are_named(world: World) -> None:
    await world.exchange(None)
    await world.exchange(1.0, complete=False)
    await world.step()
    assert world.states() == ["refused", "refused"] and world.reasons() == ["needs_score", "incomplete"]


async def test_rolling_releases_quickly_and_gates_every_few_steps(tmp_path: Path) -> None:
    world = await World(tmp_path, policy=ROLLING).open()
    for _ in range(4):
        await world.exchange(), await world.exchange()
        await world.step()
    kinds = [kind for kind, _, _ in world.judge.asked]
    assert kinds == ["smoke", "smoke", "gate", "smoke", "smoke", "gate"]
    chain = [(release.step, release.gated) for release in reversed(world.releases.list(SCENARIO))]
    assert chain == [(0, True), (1, False), (2, True), (3, False), (4, True)]
    await world.close()


async def test_rolling_steps_are_measured_against_the_last_gated_release(tmp_path: Path) -> None:
    world = await World(tmp_path, policy=ROLLING).open()
    for _ in range(3):
        await world.exchange(), await world.exchange()
        await world.step()
    gated = next(release for release in world.releases.list(SCENARIO) if release.step == 2)
    folder = world.releases.directory(gated.content_id)
    assert [reference and reference.directory for reference in world.trainer.references] == [None, None, folder]
    assert world.trainer.references[0] is not None
    await world.close()


async def test_rolling_goes_back_to_the_last_gated_release_on_a_loss(tmp_path: Path) -> None:
    world = await World(tmp_path, policy=ROLLING).open()
    world.judge.gates = [Outcome.SELECT, Outcome.REJECT]
    for _ in range(4):
        await world.exchange(), await world.exchange()
        await world.step()
    served = world.publisher.served(SCENARIO)
    gated = next(release for release in world.releases.list(SCENARIO) if release.step == 2)
    assert served.operation is Operation.ROLLBACK and served.content_id == gated.content_id
    await world.exchange(), await world.exchange()
    await world.step()
    assert world.trainer.steps[-1][0] == "state 2"
    await world.close()


async def test_rolling_goes_on_undecided_and_judges_again_at_the_next_gate(tmp_path: Path) -> None:
    world = await World(tmp_path, policy=ROLLING).open()
    world.judge.gates = [Outcome.INCONCLUSIVE, Outcome.SELECT]
    for _ in range(4):
        await world.exchange(), await world.exchange()
        await world.step()
    chain = [(release.step, release.gated) for release in reversed(world.releases.list(SCENARIO))]
    assert chain == [(0, True), (1, False), (2, False), (3, False), (4, True)]
    await world.close()


async def test_both_sides_of_every_judgement_are_loaded_however_long_the_run(tmp_path: Path) -> None:
    world = World(tmp_path, policy=Policy(Cadence.ROLLING, review=False, gate_every=9))
    world.serving = Adapters()
    smoke = world.judge.smoke

    async def looking(scenario: str, candidate: Release, current: Release) -> Verdict:
        assert world.serving is not None and world.serving.servable(candidate) and world.serving.servable(current)
        return await smoke(scenario, candidate, current)

    world.judge.smoke = looking  # type: ignore[method-assign]
    await world.open()
    for _ in range(20):
        await world.exchange(), await world.exchange()
        await world.step()
    assert [state for state, _, _ in world.jobs()] == ["settled"] * 20
    assert len(world.serving.loaded) <= 4 + 3
    await world.close()
    # A restart loads the head only; the reference comes when it is needed.
    world.serving.loaded.clear()
    await world.open()
    await world.exchange(), await world.exchange()
    await world.step()
    assert world.jobs()[-1][0] == "settled"
    await world.close()


async def test_a_rejected_candidate_is_unloaded(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.serving = Adapters()
    world.judge.gates = [Outcome.REJECT]
    await world.open()
    await world.exchange(), await world.exchange()
    await world.step()
    assert world.serving.loaded == {world.publisher.served(SCENARIO).release_id}
    await world.close()


async def test_a_quiet_stream_gets_its_last_steps_judged(tmp_path: Path) -> None:
    world = await World(tmp_path, policy=ROLLING).open()
    await world.exchange(), await world.exchange()
    await world.step()
    await world.step()
    assert [kind for kind, _, _ in world.judge.asked] == ["smoke", "gate"]
    head = world.publisher.served(SCENARIO)
    assert head.gated and head.operation is Operation.PROMOTE and head.step == 2
    await world.close()


class Killed(BaseException):
    """Stands for `kill -9`: nothing after it runs."""


def kill_at(world: World, number: int, *, after: bool) -> None:
    """Die before or after the n-th ledger write of the job."""
    write = world.log.write
    count = 0

    async def writing(fn: Callable[[Any], Any]) -> Any:
        nonlocal count
        if "jobs." not in fn.__code__.co_names and "jobs" not in fn.__code__.co_names:
            return await write(fn)
        count += 1
        if count == number and not after:
            raise Killed
        result = await write(fn)
        if count == number:
            raise Killed
        return result

    world.log.write = writing  # type: ignore[method-assign]


@pytest.mark.parametrize("number", range(1, 9))
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_a_kill_at_any_transition_ends_the_job_exactly_once(tmp_path: Path, number: int, after: bool) -> None:
    world = await World(tmp_path).open()
    await world.exchange(), await world.exchange()
    await world.lane.admit(SCENARIO)
    kill_at(world, number, after=after)
    with pytest.raises(Killed):
        await world.step()
    world.worker._running.clear()
    world.log.close()
    world.trainer.steps.clear()
    await world.open()
    await world.worker.recover()
    with world.log.read() as connection:
        left = connection.execute("SELECT COUNT(*) FROM jobs WHERE state NOT IN ('settled', 'failed')").fetchone()[0]
    assert left == 0
    await world.step()
    trained = [release for release in world.releases.list(SCENARIO) if release.operation is Operation.TRAINING]
    assert len(trained) == 1 and world.publisher.served(SCENARIO).release_id == trained[0].release_id
    assert world.states() == ["consumed", "consumed"]
    assert [state for state, _, _ in world.jobs()].count("settled") == 1
    assert not list((tmp_path / "work" / "scratch").glob("*"))
    await world.close()


async def test_the_ledger_tells_every_transition(world: World) -> None:
    await world.exchange(), await world.exchange()
    await world.step()
    with world.log.read() as connection:
        told = [row[0] for row in connection.execute("SELECT state FROM job_events ORDER BY seq")]
    assert told == [state for state in JobState if state is not JobState.FAILED]


async def test_only_states_a_later_step_may_start_from_are_kept(tmp_path: Path) -> None:
    world = await World(tmp_path, policy=Policy(Cadence.GATED, review=False, gate_every=3, keep_checkpoints=1)).open()
    for _ in range(5):
        await world.exchange(), await world.exchange()
        await world.step()
    kept = sorted((folder / "state").read_text() for folder in (tmp_path / "work" / "checkpoints" / SCENARIO).iterdir())
    assert kept == ["state 4", "state 5"]
    await world.publisher.rollback(SCENARIO, world.releases.list(SCENARIO)[-2].release_id, None, "me")
    await world.exchange(), await world.exchange()
    await world.step()
    # Its state is gone, so the step starts from the weights alone.
    assert world.trainer.steps[-1][0] is None
    await world.close()


async def test_what_was_made_to_judge_a_candidate_never_trains(world: World) -> None:
    await world.exchange(tags={"trial": "c1"})
    await world.exchange(), await world.exchange()
    await world.step()
    assert world.reasons()[0] == "trial" and world.states() == ["refused", "consumed", "consumed"]


async def test_a_harness_beside_the_weights_changes_nothing_of_a_step(world: World, tmp_path: Path) -> None:
    folder = tmp_path / "tree"
    folder.mkdir()
    (folder / "tree.json").write_text("{}")
    tree = world.releases.store(folder, "harness")
    start = world.publisher.served(SCENARIO)
    draft = Draft(tree.content_id, "harness", Surface.HARNESS, Operation.TRAINING, "user")
    harness = await world.publisher.publish(SCENARIO, draft, start.release_id)
    await world.exchange(), await world.exchange()
    await world.step()
    await world.exchange(), await world.exchange()
    await world.step()
    first, second = world.releases.list(SCENARIO)[1], world.releases.list(SCENARIO)[0]
    assert [base for base, _ in world.trainer.bases] == [start.release_id, first.release_id]
    assert world.publisher.served(SCENARIO) == second and second.evidence["harness"] == harness.content_id
    assert world.publisher.served(SCENARIO, Surface.HARNESS) == harness
    assert [release.release_id.split("-")[0] for release in (first, second)] == ["r2", "r3"]


async def test_no_step_starts_while_the_engine_is_away(world: World) -> None:
    world.serving = Adapters(away=True)
    world.publisher._serving = world.serving  # type: ignore[assignment]
    await world.exchange()
    await world.exchange()
    await world.step()
    state = world.worker.state(SCENARIO)
    assert world.jobs() == [] and (state["state"], state["done"]) == ("waiting", 2)
    assert state["phase"] == "the engine is away"
    with pytest.raises(EngineUnavailable, match="while the engine is away"):
        await world.worker.request_gate(SCENARIO)
    world.serving.away = False
    assert world.worker.state(SCENARIO)["state"] == "collecting"
    await world.step()
    assert [job[0] for job in world.jobs()] == ["settled"] and world.publisher.served(SCENARIO).step == 1


@pytest.mark.parametrize("outcome", [Outcome.SELECT, Outcome.INCONCLUSIVE])
async def test_a_step_whose_engine_leaves_says_so_and_is_taken_again(world: World, outcome: Outcome) -> None:
    """Also when the gate came to no verdict because the answers it waited for never came."""
    world.serving = serving = Adapters()
    world.publisher._serving = serving  # type: ignore[assignment]
    judge, gate = world.judge, world.judge.gate

    async def leaving(*arguments: Any) -> Verdict:
        serving.away = True
        return await gate(*arguments)

    judge.gates = [outcome]
    judge.gate = leaving  # type: ignore[method-assign]
    await world.exchange()
    await world.exchange()
    await world.step()
    ((state, _, reason),) = world.jobs()
    assert state == "failed" and str(reason).startswith("engine_unavailable"), reason
    assert world.states() == ["queued", "queued"] and len(world.releases.list(SCENARIO)) == 1
    judge.gate, serving.away = gate, False  # type: ignore[method-assign]
    await world.step()
    assert [job[0] for job in world.jobs()] == ["failed", "settled"] and world.states() == ["consumed", "consumed"]


async def test_no_step_starts_from_what_the_chain_has_left(world: World) -> None:
    """Another process moved the head, or the engine was away when it did; the step would only lose the race for it."""
    await world.exchange()
    await world.exchange()
    served = world.publisher.served(SCENARIO)
    world.releases.rollback(SCENARIO, served.release_id, served.release_id, "somebody")
    await world.step()
    assert world.jobs() == [] and world.states() == ["queued", "queued"]
    await world.publisher.follow(SCENARIO)
    await world.step()
    assert [job[0] for job in world.jobs()] == ["settled"]
