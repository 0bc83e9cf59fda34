"""A table that redraws only when its rows change, and keeps the cursor on the row it was on.

The base of the scenario, release and record tables: they say how a fact becomes cells, this says how a list of facts becomes
rows. Cells are Rich texts, never markup, so that nothing in them is interpreted.
"""

from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual import events
from textual.widgets import DataTable


class RowsTable(DataTable[Text]):
    """Rows with keys under fixed columns."""

    COLUMNS: ClassVar[tuple[tuple[str, int], ...]] = ()
    """Label and width of each column, the gap to the next included; the last one takes what is left, and at least its width."""

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id, cursor_type="row", cell_padding=0)
        self._shown: list[tuple[str, tuple[Text, ...]]] = []

    def on_mount(self) -> None:
        for label, width in self.COLUMNS:
            self.add_column(label, width=width)

    def on_resize(self, _: events.Resize) -> None:
        """Give the last column the rest of the width, so that long texts end in an ellipsis."""
        if not self.COLUMNS:
            return
        fixed = sum(width for _, width in self.COLUMNS[:-1])
        last = self.ordered_columns[-1]
        width = max(self.COLUMNS[-1][1], self.scrollable_content_region.width - fixed)
        if width != last.width:
            last.width = width
            shown, self._shown = self._shown, []
            self.show_rows(shown)

    @property
    def current_key(self) -> str | None:
        """Key of the row under the cursor."""
        return self._shown[self.cursor_row][0] if 0 <= self.cursor_row < len(self._shown) else None

    def show_rows(self, rows: Sequence[tuple[str, tuple[Text, ...]]]) -> None:
        """Replace the rows; nothing happens when they are the same."""
        if list(rows) == self._shown:
            return
        key, follow = self.current_key, self.cursor_row == 0
        self._shown = list(rows)
        self.clear()
        for name, cells in rows:
            self.add_row(*cells, key=name)
        keys = [name for name, _ in rows]
        if key in keys and not (follow and self.follows_top):
            self.move_cursor(row=keys.index(key), animate=False)

    @property
    def follows_top(self) -> bool:
        """Whether a cursor on the first row stays there when new rows come in above."""
        return False
