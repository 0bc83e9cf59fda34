"""Requests in words become reports exactly once, also those that were stored before a crash."""

import asyncio
from contextlib import suppress
from pathlib import Path

from reef_cli.core.clock import SystemClock
from reef_cli.core.types import Report
from reef_cli.experience.log import ExperienceLog
from reef_cli.harness.evolution import wish_mark
from reef_cli.harness.service import HarnessService
from reef_cli.releases.service import ReleaseService
from reef_cli.supervisor.wishes import Wishes


async def collected(wishes: Wishes, woken: list[str], count: int) -> None:
    task = asyncio.create_task(wishes.run())
    async with asyncio.timeout(10):
        while len(woken) < count:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def reports(log: ExperienceLog) -> list[Report]:
    return [report for _, report in log.reports_after("s", 0)]


async def test_each_request_becomes_one_marked_report(tmp_path: Path) -> None:
    log = ExperienceLog.open(tmp_path / "experience.db")
    service = HarnessService(ReleaseService(tmp_path), page_secret=b"x" * 32)
    await log.scenarios.ensure("s", "harness_evolve")
    woken: list[str] = []
    first = await log.instruct("s", "Be brief.")
    await collected(Wishes(log, service, "harness_evolve", SystemClock(), woken.append), woken, 1)
    (report,) = reports(log)
    wish = report.feedback
    assert isinstance(wish, dict) and (wish["kind"], wish["text"], wish["origin"]) == ("request", "Be brief.", first)
    assert report.references == () and wish["mark"] == wish_mark(service, wish)
    other = HarnessService(ReleaseService(tmp_path), page_secret=b"y" * 32)
    assert wish["mark"] != wish_mark(other, wish) and wish["mark"] != wish_mark(service, {**wish, "text": "Be long."})

    again = Wishes(log, service, "harness_evolve", SystemClock(), woken.append)
    again.asked("s")
    await collected(again, woken, 2)
    assert reports(log) == [report]

    running = Wishes(log, service, "harness_evolve", SystemClock(), woken.append)
    task = asyncio.create_task(running.run())
    await log.instruct("s", "Be kind.")
    running.asked("s")
    identity = await running.edit("s", [{"op": "remove", "id": "x"}], "r1-00000000", "not needed", "user:1")
    async with asyncio.timeout(10):
        while len(reports(log)) < 3:
            await asyncio.sleep(0.01)
    task.cancel()
    edit = next(report for report in reports(log) if report.id == identity)
    assert isinstance(edit.feedback, dict) and edit.feedback["kind"] == "proposal" and edit.feedback["base_release_id"]
    log.close()
