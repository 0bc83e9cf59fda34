"""The top line: which server, which engine, and whether it still answers."""

from rich.text import Text
from textual.widgets import Static

from reef_cli.tui.facts import Snapshot
from reef_cli.tui.feed import Lost


class StatusLine(Static):
    """One line that turns red when the server is gone."""

    def __init__(self) -> None:
        super().__init__(Text("connecting…"), id="status")
        self.said = "connecting…"

    def show(self, snapshot: Snapshot) -> None:
        self._say(snapshot.server, lost=False)

    def show_lost(self, lost: Lost) -> None:
        self._say(f"connection lost: {lost.reason}  ·  trying again in {lost.retry_s:g} s", lost=True)

    def _say(self, text: str, *, lost: bool) -> None:
        self.said = text
        self.set_class(lost, "lost")
        self.update(Text(text, no_wrap=True, overflow="ellipsis"))
