"""The dashboard driven by keys in front of a small server: what a person sees, what is asked, losing and finding the server."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from reef_cli.tui.app import ReefApp
from reef_cli.tui.confirm import ConfirmDialog
from reef_cli.tui.help import HelpScreen
from reef_cli.tui.status_line import StatusLine
from tests.control.fake_reef import TOKEN, FakeReef, record, release
from tests.tui.screen import screen_text

SNAPSHOTS = Path(__file__).parent / "snapshots"


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()


async def until(pilot: Pilot[Any], condition: Callable[[], bool], timeout_s: float = 8.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, screen_text(pilot.app)
        await pilot.pause(0.03)


@asynccontextmanager
async def dashboard(reef: FakeReef, size: tuple[int, int] = (100, 30)) -> AsyncIterator[tuple[ReefApp, Pilot[Any]]]:
    app = ReefApp(reef.url, TOKEN)
    async with app.run_test(size=size, notifications=True) as pilot:
        await until(pilot, lambda: bool(app.snapshot.records))
        await pilot.pause()
        yield app, pilot


@pytest.mark.parametrize("size", [(100, 30), (160, 50)])
async def test_the_first_screen(reef: FakeReef, size: tuple[int, int]) -> None:
    """Compared line by line with a kept screen; `UPDATE_SNAPSHOTS=1` keeps a new one after it was looked at."""
    async with dashboard(reef, size) as (app, pilot):
        await until(pilot, lambda: "r2-cccccccc  training" in screen_text(app))
        seen = screen_text(app).replace(f"{reef.port:<5}", "PORT ")
    kept = SNAPSHOTS / f"{size[0]}x{size[1]}.txt"
    if os.environ.get("UPDATE_SNAPSHOTS"):
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(seen + "\n", encoding="utf-8")
    assert seen.splitlines() == kept.read_text(encoding="utf-8").splitlines()


async def test_both_heads_of_a_scenario_are_seen(reef: FakeReef) -> None:
    reason = {"reason": "people want it short"}
    reef.releases.insert(0, release(4, "e", surface="harness", current=True, evidence=reason))
    async with dashboard(reef, (160, 50)) as (app, pilot):
        await until(pilot, lambda: "harness: people want it short" in screen_text(app))
        assert screen_text(app).count("●") == 2


async def test_what_models_wrote_cannot_drive_the_terminal_nor_the_markup(reef: FakeReef) -> None:
    reef.scenarios[0]["last_outcome"]["reason"] = "\x1b[2J[bold]x[/bold]"
    async with dashboard(reef, (160, 50)) as (app, pilot):
        await until(pilot, lambda: "last: select" in screen_text(app))
        text = screen_text(app)
        assert "\x1b" not in text
        assert "wiped [red]x[/red]" in text
        assert "[bold]x[/bold]" in text


async def test_promote_asks_shows_the_expected_head_and_sends_it(reef: FakeReef) -> None:
    async with dashboard(reef) as (app, pilot):
        await pilot.press("p")
        await until(pilot, lambda: isinstance(app.screen, ConfirmDialog))
        await pilot.pause()
        text = screen_text(app)
        assert "Promote default?" in text
        assert "expected head  r2-cccccccc" in text
        await pilot.press("n")
        await until(pilot, lambda: not isinstance(app.screen, ConfirmDialog))
        assert reef.asked("POST", "/reef/scenarios/default/promote") == []
        await pilot.press("p")
        await until(pilot, lambda: isinstance(app.screen, ConfirmDialog))
        await pilot.press("y")
        await until(pilot, lambda: (head := app.snapshot.head()) is not None and head.release_id == "r3-eeeeeeee")
        body = reef.asked("POST", "/reef/scenarios/default/promote")[0][1]
        assert body == {"release_id": "r3-dddddddd", "expected_head": "r2-cccccccc"}
        await until(pilot, lambda: "default serves r3-eeeeeeee" in screen_text(app))
        await pilot.press("p")
        await until(pilot, lambda: "nothing is held for review" in screen_text(app))


async def test_rollback_takes_the_release_under_the_cursor(reef: FakeReef) -> None:
    async with dashboard(reef) as (app, pilot):
        await pilot.press("r")
        await until(pilot, lambda: isinstance(app.screen, ConfirmDialog))
        assert ("to content of", "r1-bbbbbbbb") in app.screen.facts  # type: ignore[attr-defined]
        await pilot.press("escape")
        await pilot.press("tab", "down", "down", "down")
        await pilot.press("r")
        await until(pilot, lambda: isinstance(app.screen, ConfirmDialog))
        assert ("to content of", "r0-aaaaaaaa") in app.screen.facts  # type: ignore[attr-defined]
        await pilot.press("enter")
        await until(pilot, lambda: bool(reef.asked("POST", "/reef/scenarios/default/rollback")))
        assert reef.asked("POST", "/reef/scenarios/default/rollback")[0][1]["release_id"] == "r0-aaaaaaaa"


async def test_a_lost_race_is_told_and_the_chain_read_again(reef: FakeReef) -> None:
    async with dashboard(reef, (160, 50)) as (app, pilot):
        await pilot.press("r")
        await until(pilot, lambda: isinstance(app.screen, ConfirmDialog))
        reef._move("rollback", {"release_id": "r1-bbbbbbbb"})
        await pilot.press("y")
        await until(pilot, lambda: "the head moved: now r3-eeeeeeee" in screen_text(app))
        await until(pilot, lambda: (head := app.snapshot.head()) is not None and head.release_id == "r3-eeeeeeee")


async def test_space_pauses_and_resumes(reef: FakeReef) -> None:
    async with dashboard(reef) as (app, pilot):
        await pilot.press("space")
        await until(pilot, lambda: (row := app.snapshot.scenario()) is not None and row.paused)
        await pilot.press("space")
        await until(pilot, lambda: (row := app.snapshot.scenario()) is not None and not row.paused)


async def test_moving_in_scenarios_chooses_the_one_shown(reef: FakeReef) -> None:
    async with dashboard(reef) as (app, pilot):
        await pilot.press("down")
        await until(pilot, lambda: app.snapshot.selected == "support" and len(app.snapshot.releases) == 1)
        await pilot.press("up")
        await until(pilot, lambda: app.snapshot.selected == "default" and len(app.snapshot.releases) == 4)


async def test_events_bring_news_by_cursor_and_at_most_four_times_a_second(reef: FakeReef) -> None:
    async with dashboard(reef) as (app, pilot):
        await asyncio.to_thread(reef.wait_for_stream)
        await until(pilot, lambda: app.snapshot.live)
        before, started = len(reef.asked("GET", "/reef/status")), time.monotonic()
        for number in range(11, 61):
            reef.records.append(record(number))
            reef.push("record", str(number), {"kind": "record"})
            await pilot.pause(0.02)
        await until(pilot, lambda: app.snapshot.records[-1].sequence == 60)
        fetched, seconds = len(reef.asked("GET", "/reef/status")) - before, time.monotonic() - started
        assert fetched <= seconds * 4 + 2
        queries = [query for query, _, _ in reef.asked("GET", "/reef/scenarios/default/records")]
        assert queries[-1]["after_sequence"] != "0"
        assert len(app.snapshot.records) == 60
        assert [row.sequence for row in app.snapshot.records] == list(range(1, 61))


async def test_a_server_that_goes_away_is_said_and_found_again(reef: FakeReef) -> None:
    async with dashboard(reef) as (app, pilot):
        port = reef.port
        await asyncio.to_thread(reef.close)
        await until(pilot, lambda: "connection lost" in app.query_one(StatusLine).said)
        assert app.query_one("#main").has_class("stale")
        assert "r2-cccccccc" in screen_text(app)  # what was known stays readable
        again = await asyncio.to_thread(FakeReef, port)
        try:
            await until(pilot, lambda: "connection lost" not in app.query_one(StatusLine).said, timeout_s=12)
            assert not app.query_one("#main").has_class("stale")
        finally:
            await pilot.press("q")
            await asyncio.to_thread(again.close)


async def test_a_wrong_token_is_said(reef: FakeReef) -> None:
    app = ReefApp(reef.url, "wrong")
    async with app.run_test() as pilot:
        await until(pilot, lambda: "set REEF_TOKEN" in app.query_one(StatusLine).said)


async def test_a_server_without_scenarios_says_how_to_begin(reef: FakeReef) -> None:
    reef.scenarios.clear()
    app = ReefApp(reef.url, TOKEN)
    async with app.run_test() as pilot:
        await until(pilot, lambda: "reef chat hello" in screen_text(app))
        await pilot.press("p", "r", "space")
        assert not isinstance(app.screen, ConfirmDialog)


async def test_help_opens_and_closes(reef: FakeReef) -> None:
    async with dashboard(reef) as (app, pilot):
        await pilot.press("question_mark")
        await until(pilot, lambda: isinstance(app.screen, HelpScreen))
        await pilot.press("escape")
        await until(pilot, lambda: not isinstance(app.screen, HelpScreen))
