"""Trackers follow the ledger: each ended step once in the file, and a tracker that was away gets what it missed."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from reef_cli.supervisor.tracking import Tracking
from reef_cli.telemetry import trackers
from reef_cli.telemetry.trackers import Point, Tracker
from tests.learning.world import SCENARIO, World


class Away:
    """A tracker whose server is down until `up`."""

    def __init__(self, seen: list[Point]) -> None:
        self.seen = seen
        self.up = False

    def write(self, point: Point) -> None:
        if not self.up:
            raise OSError("no route")
        self.seen.append(point)

    def close(self) -> None: ...


def lines(folder: Path) -> list[Mapping[str, object]]:
    return [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]


async def test_every_ended_step_is_kept_once_also_over_a_restart(tmp_path: Path) -> None:
    world = await World(tmp_path / "world").open()
    folder = tmp_path / "metrics"
    first = Tracking(world.log, folder, [])
    await world.exchange(), await world.exchange()
    await world.step()
    first.follow()
    first.follow()
    first.close()
    await world.exchange(), await world.exchange()
    await world.step()
    second = Tracking(world.log, folder, [])
    second.follow()
    second.close()
    found = lines(folder)
    assert [line["step"] for line in found] == [1, 2]
    assert {line["scenario"] for line in found} == {SCENARIO}
    assert {line["outcome"] for line in found} == {"select"}
    assert all(line["values"] for line in found)
    await world.close()


async def test_a_tracker_that_was_away_gets_what_it_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[Point] = []
    away = Away(seen)

    def make(_: Path) -> Tracker:
        return away

    monkeypatch.setattr(trackers, "TRACKERS", {"away": make})
    world = await World(tmp_path / "world").open()
    tracking = Tracking(world.log, tmp_path / "metrics", ["away"])
    for _ in range(2):
        await world.exchange(), await world.exchange()
        await world.step()
        tracking.follow()
    assert len(lines(tmp_path / "metrics")) == 2
    assert [record.message for record in caplog.records if "away" in record.message] == [
        "tracker away cannot be written, trying again: no route"
    ]
    away.up = True
    tracking.follow()
    tracking.follow()
    assert [point.step for point in seen] == [1, 2]
    tracking.close()
    await world.close()
