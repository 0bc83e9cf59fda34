"""The keys."""

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Static

_KEYS = """\
tab         next table
↑ ↓         move; in scenarios: choose the one shown
p           promote the held release under the cursor, else the newest held one
r           roll back to the release under the cursor, else to the previous content
space       pause or resume learning of the scenario; serving goes on
f5          fetch everything again
q           quit; the server keeps running

● served   ? held for a person   × content gone"""


class HelpScreen(ModalScreen[None]):
    """Closed by any of the usual keys."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,question_mark,enter", "dismiss", "Close")]

    def compose(self) -> ComposeResult:
        with Vertical(id="dialog"):
            yield Static(Text("Keys\n\n", style="bold").append(_KEYS, style="not bold"))
