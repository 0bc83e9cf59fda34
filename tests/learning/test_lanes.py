"""Two recipes over one stream, and scenarios in turns: each lane its own cursor and head, one job of a scenario at a time."""

from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from reef_cli.core.clock import SystemClock
from reef_cli.core.ids import RecordId, new_id
from reef_cli.core.types import Candidate, Inference, Operation, Report, Sample, Surface, TokenTrace
from reef_cli.learning import batching, jobs, lanes
from reef_cli.learning.contract import RecipeSettings, Refusal
from reef_cli.learning.lanes import Lane
from reef_cli.learning.runner import Runner
from reef_cli.learning.worker import LearningWorker
from tests.learning.world import SCENARIO, Judge, PlainRecipe, Trainer, World


class FailureRecipe(PlainRecipe):
    """Every failing receipt is a sample of the harness's recipe."""

    name = "failures"
    surface = Surface.HARNESS

    def admit(self, report: Report, records: Sequence[Inference], step_of: Mapping[str, int]) -> Sample | Refusal:
        if report.score is None or report.score > 0:
            return Refusal("not_failing")
        ids = tuple(record.id for record in records)
        return Sample(report.id, ids, TokenTrace((), (), (), (), ()), 0.0, (), 0, report.created_at)


class Trees(Trainer):
    """Writes a tree of its own with every step."""

    async def train(
        self, scenario: str, base: Any, base_directory: Any, checkpoint: Any, samples: Any, out: Path, *_: Any
    ) -> Candidate:  # type: ignore[override]
        self.bases.append((base.release_id, base_directory))
        self.steps.append((None, [sample.id for sample in samples]))
        (out / "tree").mkdir(parents=True)
        (out / "tree" / "tree.json").write_text(f'{{"entries": [], "format": 1, "mark": {len(self.steps)}}}')
        return Candidate(out / "tree", "harness", {})


class Both(World):
    """A world whose deployment evolves weights and harness."""

    async def open(self) -> "Both":
        await super().open()
        self.trees, self.tree_judge = Trees(), Judge()
        clock = SystemClock()
        recipe = FailureRecipe(RecipeSettings(batch_size=2, max_staleness=1))
        runner = Runner(
            log=self.log, releases=self.releases, publishing=self.publisher, training=self.trees, evaluating=self.tree_judge,
            recipe=recipe, policy=self.policy, workspace=self.home / "work", clock=clock,
        )  # fmt: skip
        other = Lane(self.log, self.releases, self.publisher, recipe, runner, self.policy.cadence, clock)
        self.worker = LearningWorker(log=self.log, publishing=self.publisher, lanes=[self.lane, other], clock=clock)
        return self

    def lane_of(self, recipe: str) -> list[tuple[str, str]]:
        with self.log.read() as connection:
            return connection.execute(
                "SELECT state, reason FROM sample_state WHERE recipe = ? ORDER BY sequence", (recipe,)
            ).fetchall()


@pytest.fixture
async def both(tmp_path: Path) -> AsyncIterator[Both]:
    world = await Both(tmp_path).open()
    yield world
    await world.close()


async def test_a_record_serves_one_sample_per_surface_and_each_head_moves_by_itself(both: Both) -> None:
    await both.exchange(0.0), await both.exchange(0.0)
    await both.step()
    await both.step()
    assert [release.surface for release in both.releases.list(SCENARIO)][:2] == [Surface.HARNESS, Surface.WEIGHTS]
    assert both.lane_of("plain") == both.lane_of("failures") == [("consumed", "")] * 2
    weights, harness = (both.publisher.served(SCENARIO, surface) for surface in (Surface.WEIGHTS, Surface.HARNESS))
    assert (weights.kind, harness.kind, weights.step, harness.step) == ("lora", "harness", 1, 2)
    assert [base for base, _ in both.trees.bases] == [base for base, _ in both.trainer.bases], "both began at the creation"
    assert len(both.tree_judge.asked) == len(both.judge.asked) == 1
    again = await both.exchange(0.0, tags={"harness": harness.release_id})
    assert again is not None and both.worker.eligibility(SCENARIO, again.id) == dict.fromkeys(again.references, "eligible")


async def test_a_scenario_has_one_job_at_a_time_and_its_lanes_take_turns(both: Both) -> None:
    for _ in range(4):
        await both.exchange(0.0)
    order = []
    for _ in range(4):
        await both.worker._turn()
        assert len(both.worker._running) <= 1
        order += list(both.worker._running)
        await both.step()
    with both.log.read() as connection:
        recipes = [row[0] for row in connection.execute("SELECT recipe FROM jobs ORDER BY seq")]
    assert recipes[:2] == ["plain", "failures"], "the second turn is the other lane's"
    # The new harness dropped what waited for the weights; the failures under the old one may still teach.
    assert both.lane_of("plain") == [("consumed", "")] * 2 + [("dropped", "other_harness")] * 2
    assert recipes == ["plain", "failures", "failures"] and both.lane_of("failures") == [("consumed", "")] * 4


async def test_a_report_that_comes_in_the_middle_of_a_turn_does_not_cost_the_weights_their_batch(both: Both) -> None:
    await both.exchange(0.0)
    admit, late = both.worker._lanes["failures"].admit, []

    async def slowly(scenario: str) -> bool:
        late.append(await both.exchange(0.0)) if not late else None
        return await admit(scenario)

    both.worker._lanes["failures"].admit = slowly  # type: ignore[method-assign]
    await both.step(), await both.step()
    assert both.lane_of("plain") == both.lane_of("failures") == [("consumed", "")] * 2


async def test_failures_age_by_harness_releases_whatever_the_weights_do(both: Both) -> None:
    """`max_staleness` 1: a failure under the harness before the last is too old; ten releases of weights make it no older."""
    early = [await both.answer() for _ in range(4)]
    for receipt in early[:2]:
        await both.log.report(Report(RecordId(new_id()), SCENARIO, 2.0, (receipt,), 0.0))
    await both.step(), await both.step()
    for _ in range(3):
        await both.exchange(1.0), await both.exchange(1.0)
        await both.step()
    assert both.publisher.served(SCENARIO).step == 5
    await both.log.report(Report(RecordId(new_id()), SCENARIO, 2.0, (early[2],), 0.0))
    await both.step()
    assert both.lane_of("failures")[-1] == ("queued", ""), "one harness old"
    await both.exchange(0.0)
    await both.step(), await both.step()
    await both.log.report(Report(RecordId(new_id()), SCENARIO, 2.0, (early[3],), 0.0))
    await both.step()
    assert both.lane_of("failures")[-1] == ("dropped", "stale: 2 releases old, 1 allowed")


async def test_a_tag_of_an_unknown_harness_is_refused_by_both(both: Both) -> None:
    await both.exchange(0.0, tags={"harness": "r7-00000000"})
    await both.step()
    assert both.lane_of("plain") == [("refused", "other_harness")]
    assert both.lane_of("failures") == [("refused", "unknown_harness")]


async def test_a_lane_that_fails_rests_alone(both: Both) -> None:
    both.trainer.fault = "broken"
    await both.exchange(0.0), await both.exchange(0.0)
    await both.worker._turn()
    for task in list(both.worker._running.values()):
        await task
    await both.worker._turn()
    assert both.worker._rests((SCENARIO, "plain")) and not both.worker._rests((SCENARIO, "failures"))
    for task in list(both.worker._running.values()):
        await task
    assert both.publisher.served(SCENARIO, Surface.HARNESS).kind == "harness"


async def test_a_crash_between_two_heads_finishes_each_job_in_its_own_lane(both: Both) -> None:
    """Both jobs open at once is what an older worker could leave; each is ended by the recipe that opened it."""
    await both.exchange(0.0), await both.exchange(0.0)
    for lane in both.worker._lanes.values():
        await lane.admit(SCENARIO)
        job = await lane.next_job(SCENARIO, requested=False, manual=False)
        assert job is not None
        while job.state != "publishing":
            job = await lane.runner._handlers[job.state](job)
    await both.worker.stop()
    both.log.close()
    await both.open()
    await both.worker.recover()
    kinds = [(release.surface, release.operation) for release in both.releases.list(SCENARIO)]
    assert kinds[:2] == [(Surface.HARNESS, Operation.TRAINING), (Surface.WEIGHTS, Operation.TRAINING)]
    assert both.lane_of("plain") == both.lane_of("failures") == [("consumed", "")] * 2
    assert both.releases.verify(SCENARIO) == []


async def test_answers_that_were_not_sampled_teach_a_harness_and_no_weights(both: Both) -> None:
    await both.exchange(0.0, usage={"trainable": False, "untrainable": "greedy"})
    await both.step()
    assert both.lane_of("failures")[-1][0] == "queued"
    assert both.lane_of("plain")[-1] == ("refused", "greedy")


async def test_the_status_tells_of_each_surface(both: Both) -> None:
    await both.exchange(0.0)
    await both.step()
    state = both.worker.state(SCENARIO)
    assert state["state"] == "collecting" and set(state["surfaces"]) == {"weights", "harness"}
    assert [state["surfaces"][name]["done"] for name in ("weights", "harness")] == [1, 1]


# Scenarios


async def scenario(world: World, name: str, answers: int) -> None:
    """A scenario of its own with reported answers of its own weights."""
    await world.log.scenarios.ensure(name, "plain")
    await world.publisher.open(name)
    trace = TokenTrace((1,), (2,), (-0.5,), (1,), ())
    for _ in range(answers):
        receipt = RecordId(new_id())
        answer = Inference(
            receipt, name, 1.0, "chat", "m", b"{}", [], {"role": "assistant", "content": "x"}, "stop",
            tokens=trace, release_id=world.publisher.served(name).release_id,
        )  # fmt: skip
        await world.log.append(answer)
        await world.log.report(Report(RecordId(new_id()), name, 2.0, (receipt,), 1.0))


class Counting(PlainRecipe):
    """As plain, over traces without spans."""

    def admit(self, report: Report, records: Sequence[Inference], step_of: Mapping[str, int]) -> Sample | Refusal:
        assert records[0].tokens is not None
        return Sample(report.id, (records[0].id,), records[0].tokens, 1.0, (), 0, report.created_at)


async def test_a_busy_scenario_does_not_starve_a_quiet_one(tmp_path: Path) -> None:
    """One trainer: forty batches of one scenario wait, and the single batch of another gets the second turn."""
    world = await World(tmp_path, recipe=Counting(RecipeSettings(batch_size=2, max_staleness=100))).open()
    await scenario(world, "busy", 80)
    await world.step()
    await scenario(world, "quiet", 2)
    for _ in range(6):
        await world.step()
    with world.log.read() as connection:
        order = [row[0] for row in connection.execute("SELECT scenario FROM jobs ORDER BY seq")]
    assert order == ["busy", "quiet", "busy", "busy", "busy", "busy", "busy"]
    await scenario(world, "late", 4)
    for _ in range(4):
        await world.step()
    with world.log.read() as connection:
        order = [row[0] for row in connection.execute("SELECT scenario FROM jobs ORDER BY seq")]
    assert order[7:] == ["late", "busy", "late", "busy"], "in turns while both have work"
    await world.close()


async def test_a_long_backlog_is_admitted_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "PAGE", 3)
    world = await World(tmp_path, recipe=Counting(RecipeSettings(batch_size=64))).open()
    await scenario(world, "busy", 40)
    await scenario(world, "quiet", 2)

    def admitted(name: str) -> int:
        with world.log.read() as connection:
            return len(jobs.queued(connection, name, "plain", 100))

    world.worker._wake.clear()
    await world.worker._turn()
    assert (admitted("busy"), admitted("quiet")) == (3 * lanes.PAGES, 2)
    assert world.worker._wake.is_set(), "the rest has its turn at once"
    for _ in range(4):
        await world.worker._turn()
    assert admitted("busy") == 40
    await world.close()
