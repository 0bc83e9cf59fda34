"""Learning's metrics come from the ledger: every job, swap and drop counted once, none from before the start."""

from pathlib import Path

from reef_cli.supervisor.meters import LearningMeters
from reef_cli.telemetry.metrics import Metrics
from tests.learning.world import SCENARIO, World


async def test_jobs_swaps_and_drops_are_counted_once(tmp_path: Path) -> None:
    world = await World(tmp_path).open()
    await world.exchange(), await world.exchange()
    await world.step()
    metrics = Metrics()
    meters = LearningMeters(world.log, metrics)
    await world.exchange(None)
    await world.exchange(), await world.exchange()
    await world.step()
    for _ in range(2):
        meters.collect()
    assert metrics.jobs.value(scenario=SCENARIO, outcome="select") == 1
    assert metrics.swaps.value(result="served") == 1
    assert metrics.dropped.value(scenario=SCENARIO, reason="needs_score") == 1
    assert metrics.job_seconds.count(phase="training") == 1
    text = metrics.expose()
    assert "reef_swap_seconds_count 1" in text
    await world.close()
