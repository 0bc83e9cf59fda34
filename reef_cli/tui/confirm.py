"""The question before a release moves: what, from which head, to which content."""

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Static


class ConfirmDialog(ModalScreen[bool]):
    """Answers True on y or enter, False on n or escape."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y,enter", "answer(True)", "Yes"),
        Binding("n,escape", "answer(False)", "No"),
    ]

    def __init__(self, question: str, facts: tuple[tuple[str, str], ...]) -> None:
        super().__init__()
        self.question = question
        self.facts = facts

    def compose(self) -> ComposeResult:
        text = Text(self.question + "\n\n", style="bold")
        width = max(len(name) for name, _ in self.facts)
        for name, fact in self.facts:
            text.append(f"{name:<{width}}  ", style="dim").append(f"{fact}\n", style="not bold")
        text.append("\ny yes   n no", style="cyan")
        with Vertical(id="dialog"):
            yield Static(text)

    def action_answer(self, answer: bool) -> None:
        self.dismiss(answer)
