"""The release chain of the selected scenario, newest first: ● served, ? held for a person, × content gone."""

import time
from collections.abc import Sequence

from rich.text import Text

from reef_cli.tui.facts import ReleaseRow
from reef_cli.tui.rows_table import RowsTable


class ReleasesTable(RowsTable):
    """One row per release with its evidence."""

    COLUMNS = (("", 2), ("release", 13), ("operation", 10), ("at", 6), ("evidence", 14))

    def __init__(self) -> None:
        super().__init__(id="releases")
        self.border_title = "releases"

    @property
    def follows_top(self) -> bool:
        return True

    def show(self, releases: Sequence[ReleaseRow]) -> None:
        held = sum(row.pending for row in releases)
        self.border_title = f"releases  ? {held} held" if held else "releases"
        self.show_rows([(row.release_id, _cells(row)) for row in releases])


def _cells(row: ReleaseRow) -> tuple[Text, ...]:
    style = "bold green" if row.current else "yellow" if row.pending else "" if row.restorable else "dim"
    at = time.strftime("%H:%M", time.localtime(row.recorded_at)) if row.recorded_at else ""
    evidence = row.evidence or ("gated" if row.gated else "")
    if row.surface == "harness" and row.operation != "creation":
        evidence = f"harness: {evidence}".removesuffix(": ")
    texts = (row.mark, row.release_id, row.operation, at, evidence)
    return tuple(Text(text, style=style, no_wrap=True, overflow="ellipsis") for text in texts)
