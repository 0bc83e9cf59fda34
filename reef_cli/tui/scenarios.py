"""The scenarios: state, head, and how the reward went."""

from collections.abc import Sequence

from rich.text import Text

from reef_cli.control.plain import one_line
from reef_cli.tui.curve import sparkline
from reef_cli.tui.facts import ScenarioRow
from reef_cli.tui.rows_table import RowsTable

_STYLES = {"idle": "dim", "collecting": "cyan", "waiting": "yellow", "failed": "red"}


class ScenariosTable(RowsTable):
    """One row per workload; the row under the cursor is the selected one."""

    COLUMNS = (("scenario", 11), ("head", 13), ("reward", 12), ("state", 9))

    def __init__(self) -> None:
        super().__init__(id="scenarios")
        self.border_title = "scenarios"

    def show(self, scenarios: Sequence[ScenarioRow]) -> None:
        self.show_rows([(row.name, _cells(row)) for row in scenarios])


def _cells(row: ScenarioRow) -> tuple[Text, ...]:
    state = "paused" if row.paused else row.state
    style = "yellow" if row.paused else _STYLES.get(row.state, "green")
    reward = Text(sparkline(row.rewards, 6), style="green")
    if row.rewards:
        reward.append(f" {row.rewards[-1]:.2f}")
    return Text(one_line(row.name, 10)), Text(row.head or "-"), reward, Text(state, style=style)
