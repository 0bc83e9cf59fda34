"""What the selected scenario is doing: phase and progress of its job, counts, the last outcome, and the reward curve."""

from rich.text import Text
from textual import events
from textual.widgets import Static

from reef_cli.tui.curve import bar, chart
from reef_cli.tui.facts import ScenarioRow

_COUNTS = ("records", "reports", "queued", "reserved", "consumed", "dropped")


class JobPanel(Static):
    """Lines that fit the panel's size; the curve takes what height is left."""

    def __init__(self) -> None:
        super().__init__(id="job")
        self.border_title = "job"
        self._row: ScenarioRow | None = None

    def show(self, row: ScenarioRow | None) -> None:
        if row != self._row:
            self._row = row
            self.redraw()

    def on_resize(self, _: events.Resize) -> None:
        self.redraw()

    def redraw(self) -> None:
        self.update(job_text(self._row, max(10, self.content_size.width), max(4, self.content_size.height)))


def job_text(row: ScenarioRow | None, width: int, height: int) -> Text:
    """The panel's text for a size in cells."""
    if row is None:
        return Text("no scenario yet\n\nreef chat hello\nmakes the first record", style="dim")
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(_headline(row) + "\n", style="bold")
    if row.total:
        progress = f" {row.done}/{row.total}"
        text.append(bar(row.done, row.total, max(4, min(40, width - len(progress)))) + progress + "\n", style="cyan")
    counts = "  ".join(f"{name} {count}" for name, count in row.counts if name in _COUNTS)
    if counts:
        text.append(counts + "\n", style="dim")
    if row.outcome:
        text.append(f"last: {row.outcome}\n")
    _append_curve(text, row, width, height - text.plain.count("\n"))
    return text


def _headline(row: ScenarioRow) -> str:
    phase = f", {row.phase}" if row.phase and row.phase != row.state else ""
    job = f"  job …{row.job_id[-8:]}" if row.job_id else ""
    return f"{'paused, ' if row.paused else ''}{row.state}{phase}{job}"


def _append_curve(text: Text, row: ScenarioRow, width: int, height: int) -> None:
    if not row.rewards or height < 3:
        return
    text.append(f"\nreward per step, {min(row.rewards):.2f} to {max(row.rewards):.2f}\n", style="dim")
    for line in chart(_stretched(row.rewards, width), width, min(8, height - 2)):
        text.append(line + "\n", style="green")


def _stretched(values: tuple[float, ...], width: int) -> list[float]:
    """Few values drawn wider, so that a young curve is readable."""
    repeat = max(1, min(4, width // max(1, len(values))))
    return [value for value in values for _ in range(repeat)]
