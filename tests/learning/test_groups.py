"""Group batches: whole groups only, oldest first; incomplete ones wait, time out by name, break with a stale member."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from reef_cli.core.errors import ConfigError
from reef_cli.core.ids import RecordId
from reef_cli.core.types import Cadence, Inference, Report, Sample
from reef_cli.learning import batching
from reef_cli.learning.cadence import Policy
from reef_cli.learning.contract import Group, GroupSettings, Refusal, Tools
from reef_cli.learning.jobs import Queued
from tests.learning.world import SCENARIO, PlainRecipe, World


class Grouped(PlainRecipe):
    """Groups named by `metadata.group`; each sample learns from the batch how many correct siblings it has."""

    def admit(self, report: Report, records: Sequence[Inference], step_of: Mapping[str, int]) -> Sample | Refusal:
        fate = super().admit(report, records, step_of)
        return replace(fate, extras=dict(report.metadata)) if isinstance(fate, Sample) else fate

    def group(self, sample: Sample) -> Group:
        size = self.settings.group_size if isinstance(self.settings, GroupSettings) else 1
        return Group(str(sample.extras["group"]), size, str(sample.extras.get("rollout", "")))

    def assemble(self, samples: Sequence[Sample], tools: Tools) -> list[Sample]:
        good = sum(sample.reward > 0 for sample in samples)
        return [replace(sample, extras={**sample.extras, "good": good}) for sample in samples]


@dataclass
class Seat:
    """Reports for one world."""

    world: World

    async def fill(self, *members: str, **more: Any) -> list[Report]:
        """`a0 a1 b0`: group a's rollouts 0 and 1, group b's rollout 0."""
        return [
            await self.world.exchange(float(int(member[1:]) == 0), metadata={"group": member[0], "rollout": member[1:]}, **more)
            for member in members
        ]


async def grouped(tmp_path: Path, **settings: Any) -> Seat:
    recipe = Grouped(GroupSettings(**{"batch_size": 2, "group_size": 2, **settings}))
    return Seat(await World(tmp_path, recipe=recipe).open())


async def test_a_batch_takes_the_oldest_whole_groups(tmp_path: Path) -> None:
    seat = await grouped(tmp_path)
    reports = await seat.fill("a0", "b0", "c0", "c1", "b1")
    await seat.world.step()
    await seat.world.step()
    taken = [ids for _, ids in seat.world.trainer.steps]
    assert taken == [[reports[1].id, reports[4].id], [reports[2].id, reports[3].id]]
    assert seat.world.states() == ["queued"] + ["consumed"] * 4
    await seat.world.close()


async def test_a_batch_waits_until_enough_groups_are_whole(tmp_path: Path) -> None:
    seat = await grouped(tmp_path, batch_size=4)
    await seat.fill("a0", "a1", "b0")
    await seat.world.step()
    assert seat.world.jobs() == []
    await seat.fill("b1")
    await seat.world.step()
    assert seat.world.states() == ["consumed"] * 4
    await seat.world.close()


async def test_a_step_asked_for_takes_whole_groups_only(tmp_path: Path) -> None:
    seat = await grouped(tmp_path, batch_size=4)
    await seat.fill("a0", "b0", "b1")
    seat.world.worker.request_step(SCENARIO)
    await seat.world.step()
    assert seat.world.states() == ["queued", "consumed", "consumed"]
    await seat.world.close()


async def test_the_recipe_completes_samples_from_their_batch(tmp_path: Path) -> None:
    seat = await grouped(tmp_path)
    seen: list[Any] = []
    train = seat.world.trainer.train

    async def looking(scenario: str, base: Any, folder: Any, checkpoint: Any, samples: Any, *rest: Any) -> Any:
        seen.extend(samples)
        return await train(scenario, base, folder, checkpoint, samples, *rest)

    seat.world.trainer.train = looking  # type: ignore[method-assign,assignment]
    await seat.fill("a0", "a1")
    await seat.world.step()
    assert [sample.extras["good"] for sample in seen] == [1, 1]
    await seat.world.close()


async def test_an_incomplete_group_times_out_by_name(tmp_path: Path) -> None:
    seat = await grouped(tmp_path, group_timeout_s=0.0)
    await seat.fill("a0")
    await seat.world.step()
    assert seat.world.states() == ["dropped"] and seat.world.reasons() == ["group_timeout: 1 of 2 after 0 s"]
    await seat.fill("a0", "a1")
    await seat.world.step()
    assert seat.world.states() == ["dropped", "consumed", "consumed"]
    await seat.world.close()


async def test_a_stale_member_takes_its_group_along_and_no_other(tmp_path: Path) -> None:
    seat = await grouped(tmp_path, max_staleness=0)
    start = seat.world.publisher.served(SCENARIO)
    await seat.fill("a0", "a1")
    await seat.world.step()
    await seat.fill("b0", release=start)
    await seat.fill("b1", "c0")
    await seat.world.step()
    assert seat.world.states()[2:] == ["dropped", "dropped", "queued"]
    assert seat.world.reasons()[2:4] == ["stale: 1 releases old, 0 allowed", "group_broken: another member is stale"]
    await seat.fill("c1")
    await seat.world.step()
    assert seat.world.states()[4:] == ["consumed", "consumed"]
    await seat.world.close()


async def test_a_place_in_a_group_is_taken_once(tmp_path: Path) -> None:
    seat = await grouped(tmp_path)
    await seat.fill("a0", "a0", "a1", "a2")
    await seat.world.step()
    await seat.fill("a3")
    await seat.world.step()
    assert seat.world.states() == ["consumed", "refused", "consumed", "refused", "refused"]
    assert [reason for reason in seat.world.reasons() if reason] == ["member_taken", "group_full", "group_full"]
    await seat.world.close()


async def test_a_promotion_of_the_same_weights_makes_no_sample_stale(tmp_path: Path) -> None:
    """An idle gate appends a release to the chain; a grid that is being filled must survive it at max_staleness 0."""
    recipe = Grouped(GroupSettings(batch_size=2, group_size=2, max_staleness=0))
    seat = Seat(await World(tmp_path, recipe=recipe, policy=Policy(Cadence.ROLLING, False, 9)).open())
    await seat.fill("a0", "a1")
    await seat.world.step()
    served = seat.world.publisher.served(SCENARIO)
    await seat.fill("b0")
    await seat.world.step()
    assert seat.world.publisher.served(SCENARIO).step == served.step + 1
    await seat.fill("b1")
    await seat.world.step()
    assert seat.world.states() == ["consumed"] * 4
    await seat.world.close()


def test_a_batch_size_that_cuts_a_group_is_refused() -> None:
    with pytest.raises(ConfigError, match="no multiple"):
        GroupSettings(batch_size=10, group_size=4)


def test_choosing_is_by_first_member_and_never_splits() -> None:
    def item(n: int, group: str, size: int) -> Queued:
        return Queued(RecordId(f"r{n}"), n, 0, 0.0, group, size)

    waiting = [item(1, "a", 3), item(2, "b", 2), item(3, "a", 3), item(4, "b", 2), item(5, "", 1), item(6, "a", 3)]
    assert [i.sequence for i in batching.choose(waiting, 4)] == [1, 3, 6, 2, 4]
    assert [i.sequence for i in batching.choose(waiting[:5], 3)] == [2, 4, 5]
    assert batching.choose(waiting[:5], 4) == []
    assert [i.sequence for i in batching.choose(waiting[:4], 4, short=True)] == [2, 4]
