"""Weights never learn from what was made under another harness; samples that want a batch of their own get one."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reef_cli.core.ids import RecordId, new_id
from reef_cli.core.types import Draft, Operation, Release, Report, Sample, Surface
from reef_cli.learning import coupling, jobs
from reef_cli.learning.contract import Group, RecipeSettings
from tests.learning.world import SCENARIO, PlainRecipe, World


async def harness(world: World, text: str) -> Release:
    """A harness release, at the head of its surface."""
    folder = world.home / f"tree-{text}"
    folder.mkdir()
    (folder / "tree.json").write_text(f'{{"entries": [], "format": 1, "text": "{text}"}}')
    artifact = world.releases.store(folder, "harness")
    draft = Draft(artifact.content_id, "harness", Surface.HARNESS, Operation.TRAINING, "me")
    return await world.publisher.publish(SCENARIO, draft, world.publisher.served(SCENARIO, Surface.HARNESS).release_id)


def fates(world: World) -> list[tuple[str, str]]:
    with world.log.read() as connection:
        return connection.execute("SELECT state, reason FROM sample_state ORDER BY sequence").fetchall()


async def report(world: World, receipt: RecordId) -> None:
    await world.log.report(Report(RecordId(new_id()), SCENARIO, 2.0, (receipt,), 1.0))


async def test_a_sample_made_under_an_earlier_harness_does_not_train(world: World) -> None:
    early = [await world.answer(), await world.answer()]
    first = await harness(world, "one")
    await report(world, early[0])
    await world.exchange()
    await world.exchange(tags={"harness": first.release_id})
    for named in ("r0-00000000", world.publisher.served(SCENARIO).release_id):
        await world.exchange(tags={"harness": named})
    await world.step()
    refused = ("refused", "other_harness")
    assert fates(world) == [refused, ("consumed", ""), ("consumed", ""), refused, refused]


async def test_the_weights_that_answered_say_nothing_about_the_harness(world: World) -> None:
    """Two heads: the second harness comes after the weights, so the same weights answered under both."""
    first = await harness(world, "one")
    await world.exchange(), await world.exchange()
    await world.step()
    weights = world.publisher.served(SCENARIO)
    assert weights.kind == "lora" and weights.step == 2
    old = [await world.answer(), await world.answer(tags={"harness": first.release_id})]
    second = await harness(world, "two")
    assert world.publisher.served(SCENARIO) == weights, "a harness takes no weights out of service"
    for receipt in old:
        await report(world, receipt)
    await world.exchange(), await world.exchange(tags={"harness": second.release_id})
    await world.step()
    assert [state for state, _ in fates(world)] == ["consumed"] * 2 + ["refused"] * 2 + ["consumed"] * 2
    assert world.publisher.served(SCENARIO).step == 4 and world.publisher.served(SCENARIO, Surface.HARNESS) == second


async def test_a_harness_released_while_samples_wait_drops_them_by_name(world: World) -> None:
    await world.exchange()
    await world.step()
    assert fates(world) == [("queued", "")]
    await harness(world, "one")
    await world.exchange()
    await world.step()
    assert fates(world) == [("dropped", "other_harness"), ("queued", "")] and world.jobs() == []


async def test_a_harness_released_after_a_batch_was_taken_blames_no_sample(world: World) -> None:
    await world.exchange(), await world.exchange()
    await world.lane.admit(SCENARIO)
    job = await world.lane.next_job(SCENARIO, requested=False, manual=False)
    assert job is not None
    await harness(world, "one")
    ended = await world.runner.drive(job)
    assert (ended.state, world.trainer.steps) == ("failed", []) and "harness was replaced" in str(ended.reason)
    with world.log.read() as connection:
        assert connection.execute("SELECT state, attempts FROM sample_state").fetchall() == [("queued", 0)] * 2
    await world.step()
    assert fates(world) == [("dropped", "other_harness")] * 2


async def test_weights_released_while_samples_wait_do_not_make_their_harness_another(world: World) -> None:
    """The step of a sample is that of its weights, which says nothing about the harness they stood in."""
    await world.exchange()
    await harness(world, "one")
    await world.exchange(), await world.exchange()
    await world.step()
    await world.exchange()
    await world.step()
    assert fates(world) == [("refused", "other_harness"), ("consumed", ""), ("consumed", ""), ("queued", "")]


async def test_the_same_content_is_the_same_harness(world: World) -> None:
    first = await harness(world, "one")
    early = await world.answer()
    await harness(world, "two")
    back = await world.publisher.rollback(SCENARIO, first.release_id, None, "me")
    assert back.content_id == first.content_id and world.publisher.served(SCENARIO, Surface.HARNESS) == back
    await report(world, early)
    await world.exchange(tags={"harness": first.release_id})
    await world.step()
    assert [state for state, _ in fates(world)] == ["consumed", "consumed"]
    chain = world.releases.list(SCENARIO)
    assert coupling.in_force(chain) == first.content_id and coupling.in_force(chain[-1:]) == coupling.NONE
    await world.publisher.rollback(SCENARIO, chain[-1].release_id, None, "me", surface=Surface.HARNESS)
    assert coupling.in_force(world.releases.list(SCENARIO)) == coupling.NONE


class Urgent(PlainRecipe):
    """Answers scored above 1 want a batch of their own."""

    def group(self, sample: Sample) -> Group:
        return Group(f"alone {sample.id}", 0) if sample.reward > 1 else Group("", 1)


async def test_a_sample_that_wants_a_batch_of_its_own_goes_first_and_alone(tmp_path: Path) -> None:
    world = await World(tmp_path, recipe=Urgent(RecipeSettings(batch_size=2))).open()
    for score in (0.0, 2.0, 1.0, 3.0):
        await world.exchange(score)
    for _ in range(4):
        await world.step()
    assert [len(samples) for _, samples in world.trainer.steps] == [1, 1, 2]
    await world.close()


async def test_a_step_without_a_candidate_says_its_own_outcome_and_reason(world: World) -> None:
    train = world.trainer.train

    async def refused(*args: Any) -> Any:
        candidate = await train(*args)
        return type(candidate)(candidate.directory, "lora", {"policy_updated": False, "outcome": "reject", "reason": "no good"})

    world.trainer.train = refused  # type: ignore[assignment,method-assign]
    await world.exchange(), await world.exchange()
    await world.step()
    assert world.jobs() == [("settled", "reject", "no good")]


def test_a_chain_without_harness_moves_nothing() -> None:
    waiting: Sequence[jobs.Queued] = [jobs.Queued("a", 1, 0)]  # type: ignore[arg-type]
    assert coupling.moved(waiting, []) == []
