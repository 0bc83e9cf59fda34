"""The last records of the selected scenario, newest first."""

import time
from collections.abc import Sequence

from rich.text import Text

from reef_cli.tui.facts import RecordRow
from reef_cli.tui.rows_table import RowsTable

SHOWN = 60
_STYLES = {"report": "cyan", "train": "magenta"}


class RecordsTable(RowsTable):
    """One row per record."""

    COLUMNS = (("seq", 6), ("at", 9), ("kind", 10), ("score", 6), ("text", 14))

    def __init__(self) -> None:
        super().__init__(id="records")
        self.border_title = "records"

    @property
    def follows_top(self) -> bool:
        return True

    def show(self, records: Sequence[RecordRow]) -> None:
        self.show_rows([(str(row.sequence), _cells(row)) for row in reversed(records[-SHOWN:])])


def _cells(row: RecordRow) -> tuple[Text, ...]:
    style = "red" if row.failed else _STYLES.get(row.kind, "")
    at = time.strftime("%H:%M:%S", time.localtime(row.created_at)) if row.created_at else ""
    score = "" if row.score is None else f"{row.score:.2f}"
    texts = (str(row.sequence), at, row.kind, score, row.text)
    return tuple(Text(text, style=style, no_wrap=True, overflow="ellipsis") for text in texts)
