"""The dashboard's application: composes the widgets, hands snapshots down, carries out what a person asks.

Everything it does goes through the HTTP API in worker threads. Promote and rollback send the head the person saw, so that a
chain that moved meanwhile answers with a conflict instead of being moved again.
"""

from collections.abc import Callable
from typing import Any, ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.widgets import DataTable, Footer

from reef_cli.control.client import Client, segment
from reef_cli.control.plain import one_line
from reef_cli.core.errors import ReefError
from reef_cli.tui.confirm import ConfirmDialog
from reef_cli.tui.facts import ReleaseRow, Snapshot
from reef_cli.tui.feed import Feed, Lost, Update
from reef_cli.tui.help import HelpScreen
from reef_cli.tui.job import JobPanel
from reef_cli.tui.records import RecordsTable
from reef_cli.tui.releases import ReleasesTable
from reef_cli.tui.scenarios import ScenariosTable
from reef_cli.tui.status_line import StatusLine


class ReefApp(App[int]):
    """`reef tui`."""

    TITLE = "Reef"
    CSS_PATH = "app.tcss"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("p", "promote", "Promote"),
        Binding("r", "rollback", "Roll back"),
        Binding("space", "pause", "Pause/resume"),
        Binding("f5", "refresh", "Refresh", show=False),
        Binding("question_mark", "help", "Help", key_display="?"),
        Binding("q", "quit", "Quit"),
    ]

    def __init__(self, url: str, token: str | None) -> None:
        super().__init__()
        self._url, self._token = url, token
        self._feed = Feed(url, token, self._from_feed)
        self.snapshot = Snapshot()

    def compose(self) -> ComposeResult:
        yield StatusLine()
        with Horizontal(id="main"):
            with Vertical(id="left"):
                yield ScenariosTable()
                yield JobPanel()
            with Vertical(id="right"):
                yield ReleasesTable()
                yield RecordsTable()
        yield Footer()

    def on_mount(self) -> None:
        self.query_one(ScenariosTable).focus()
        self._feed.start()

    def on_unmount(self) -> None:
        self._feed.stop()

    def _from_feed(self, update: Update) -> None:
        """Called by the feed's thread; a dashboard that is closing takes no more."""
        if self.is_running:
            self.call_later(self._show, update)

    def _show(self, update: Update) -> None:
        if isinstance(update, Lost):
            self.query_one("#main").add_class("stale")
            self.query_one(StatusLine).show_lost(update)
            return
        self.snapshot = update
        self.query_one("#main").remove_class("stale")
        self.query_one(StatusLine).show(update)
        self.query_one(ScenariosTable).show(update.scenarios)
        self.query_one(JobPanel).show(update.scenario())
        self.query_one(ReleasesTable).show(update.releases)
        self.query_one(RecordsTable).show(update.records)

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        """The scenario under the cursor is the one shown."""
        if isinstance(event.data_table, ScenariosTable) and event.row_key.value is not None:
            self._feed.select(event.row_key.value)

    def action_promote(self) -> None:
        under = self._under_cursor()
        target = under if under is not None and under.pending else self.snapshot.held()
        if target is None:
            self._say("nothing is held for review", severity="warning")
            return
        self._ask_move("promote", target)

    def action_rollback(self) -> None:
        under = self._under_cursor()
        usable = under is not None and not under.current and not under.pending
        target = under if usable else self.snapshot.previous()
        if target is None:
            self._say("there is no earlier content to go back to", severity="warning")
            return
        self._ask_move("rollback", target)

    def action_pause(self) -> None:
        row = self.snapshot.scenario()
        if row is None:
            return
        verb = "resume" if row.paused else "pause"
        self._call(row.name, verb, {}, lambda _: f"{row.name} {verb}d")

    def action_refresh(self) -> None:
        self._feed.poke()

    def action_help(self) -> None:
        self.push_screen(HelpScreen())

    def _under_cursor(self) -> ReleaseRow | None:
        """The release under the cursor, when a person is in that table."""
        table = self.query_one(ReleasesTable)
        key = table.current_key if table.has_focus else None
        return next((row for row in self.snapshot.releases if row.release_id == key), None)

    def _ask_move(self, verb: str, target: ReleaseRow) -> None:
        scenario, head = self.snapshot.selected, self.snapshot.replaced_by(target)
        if scenario is None or head is None:
            return
        facts = (
            ("scenario", scenario),
            ("expected head", head.release_id),
            ("to content of", target.release_id),
            ("evidence", one_line(target.evidence or "none", 60)),
        )
        body = {"release_id": target.release_id, "expected_head": head.release_id}

        def answered(yes: bool | None) -> None:
            if yes:
                self._call(scenario, verb, body, lambda answer: f"{scenario} serves {answer.get('release_id')}")

        self.push_screen(ConfirmDialog(f"{'Promote' if verb == 'promote' else 'Roll back'} {scenario}?", facts), answered)

    def _call(self, scenario: str, verb: str, body: dict[str, Any], done: Callable[[Any], str]) -> None:
        """POST in a worker thread and say how it went."""

        def work() -> None:
            client = Client(self._url, self._token, timeout_s=600.0)
            try:
                text, severity = done(client.post(f"/reef/scenarios/{segment(scenario)}/{verb}", body) or {}), "information"
            except ReefError as error:
                text, severity = " ".join(filter(None, [error.message, error.hint and f"({error.hint})"])), "error"
            finally:
                client.close()
            self.call_from_thread(self._say, text, severity=severity)
            self._feed.poke()

        self.run_worker(work, thread=True, group="move", exit_on_error=False)

    def _say(self, text: str, *, severity: Any = "information") -> None:
        self.notify(one_line(text), severity=severity, markup=False)
