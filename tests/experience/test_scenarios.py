"""The registry: names, recipes for life, modes, archives."""

import asyncio
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reef_cli.core.errors import ConflictError, InvalidRequest, InvalidScenario, JobOut, ScenarioNotFound
from reef_cli.core.types import Inference, Report
from reef_cli.experience.log import ExperienceLog

Make = Callable[..., Inference]
MakeReport = Callable[..., Report]


def open_job(state: str) -> Callable[[sqlite3.Connection], None]:
    def work(connection: sqlite3.Connection) -> None:
        connection.execute(
            "INSERT INTO jobs (id, scenario, recipe, state, base_release_id, created_at, updated_at) VALUES"
            " ('j1', 's1', 'r', ?, 'r0-00000000', 0, 0)",
            (state,),
        )
        connection.execute("INSERT INTO job_events (job_id, scenario, at, state) VALUES ('j1', 's1', 0, ?)", (state,))

    return work


@pytest.mark.parametrize("name", ["", " ", "a b", "../x", "a..b", "x" * 65, "-a", "a~1", "a.lock"])
async def test_bad_names_make_nothing(log: ExperienceLog, name: str) -> None:
    with pytest.raises(InvalidScenario):
        await log.scenarios.ensure(name)
    assert [scenario.name for scenario in log.scenarios.list()] == ["s1"]


async def test_ensure_is_idempotent_also_at_once(log: ExperienceLog) -> None:
    found = await asyncio.gather(*(log.scenarios.ensure("s9", "a:B", mode="manual") for _ in range(20)))
    assert len({scenario.row for scenario in found}) == 1
    assert log.scenarios.get("s9") == found[0]
    assert (found[0].recipe, found[0].mode, found[0].paused) == ("a:B", "manual", False)


async def test_a_recipe_is_for_life(log: ExperienceLog, path: Path) -> None:
    await log.scenarios.ensure("s2", "a:B")
    with pytest.raises(ConflictError, match="a:B"):
        await log.scenarios.ensure("s2", "c:D")
    assert (await log.scenarios.ensure("s2")).recipe == "a:B"
    # Recorded only so far: it may get its first recipe, and then keeps it.
    assert (await log.scenarios.ensure("s1", "c:D")).recipe == "c:D"
    log.close()
    again = ExperienceLog.open(path)
    with pytest.raises(ConflictError):
        await again.scenarios.ensure("s1", "a:B")
    again.close()


async def test_mode_and_pause_are_seen_at_once_and_kept(log: ExperienceLog, path: Path) -> None:
    await log.scenarios.set_mode("s1", "hybrid")
    assert (await log.scenarios.pause("s1")).paused
    assert log.scenarios.get("s1").paused
    log.close()
    again = ExperienceLog.open(path)
    assert (again.scenarios.get("s1").mode, again.scenarios.get("s1").paused) == ("hybrid", True)
    assert not (await again.scenarios.resume("s1")).paused
    with pytest.raises(InvalidRequest):
        await again.scenarios.set_mode("s1", "sometimes")  # type: ignore[arg-type]
    for change in (again.scenarios.pause, again.scenarios.archive):
        with pytest.raises(ScenarioNotFound):
            await change("nowhere")
    assert again.scenarios.find("nowhere") is None
    again.close()


async def test_an_archived_name_starts_an_empty_stream(
    log: ExperienceLog, path: Path, make: Make, report: MakeReport, settle: Callable[..., Any]
) -> None:
    record = make("a")
    feedback = report(record, id="g:1")
    await log.append(record)
    await log.report(feedback)
    await settle(feedback, "consumed")
    await log.write(open_job("settled"))
    archived = await log.scenarios.archive("s1")
    assert log.scenarios.find("s1") is None
    assert archived.name != "s1" and archived.archived_at is not None
    with pytest.raises(ScenarioNotFound):
        await log.append(make("b"))
    await log.scenarios.ensure("s1", "other:Recipe")
    assert log.page("s1") == []
    assert log.counts("s1")["records"] == log.counts("s1")["consumed"] == 0
    assert log.references([record.id]) == []
    # The old ids may come back, as after importing an export, and are new to the ledger.
    assert await log.import_batch([record, feedback]) == [True, True]
    await settle(feedback, "queued")
    assert log.eligibility("s1", [record.id])[0].reason == "already_sampled"
    assert log.counts(archived.name)["consumed"] == 1
    assert [row.id for row in log.page(archived.name)] == [record.id, "g:1"]
    assert log.get(archived.name, record.id) is not None
    log.close()
    again = ExperienceLog.open(path)
    assert [scenario.name for scenario in again.archived()] == [archived.name]
    assert len(again.page("s1")) == 2
    again.close()


async def test_a_scenario_with_a_job_out_is_not_archived(log: ExperienceLog) -> None:
    await log.write(open_job("training"))
    with pytest.raises(JobOut, match="j1"):
        await log.scenarios.archive("s1")
    assert log.scenarios.get("s1").archived_at is None
    await log.write(lambda connection: connection.execute("UPDATE jobs SET state = 'settled'").rowcount)
    await log.scenarios.archive("s1")
