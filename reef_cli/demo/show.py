"""What a person sees of the demo: one live panel on a terminal, plain lines elsewhere, nothing with `--json`."""

import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from reef_cli.demo.scenes import Scene

if TYPE_CHECKING:
    from reef_cli.demo.run import Result

_BARS = "▁▂▃▄▅▆▇█"
_EVERY_S = 5.0


class Show:
    """Progress on stderr. Thread-safe enough for one caller. `curve` names what rises, `share` says what a reward is of it."""

    def __init__(self, *, quiet: bool = False, curve: str = "reward", share: Callable[[float], float] = float) -> None:
        self._name, self._share = curve, share
        self._console = Console(stderr=True, quiet=quiet, highlight=False)
        self._live: Live | None = None
        self._phase = ""
        self._curve = ""
        self._facts: list[str] = []
        self._printed = 0.0
        if self._console.is_terminal and not quiet:
            self._live = Live(console=self._console, refresh_per_second=4, get_renderable=self._draw)
            self._live.start()

    def phase(self, text: str) -> None:
        """What happens now, in words."""
        if text != self._phase:
            self._phase = text
            self._line(text)

    def measured(self, when: str, score: float, release_id: str) -> None:
        self._facts.append(f"held-out score {when}: {score:.2f} ({release_id})")
        self._line(self._facts[-1])

    def learning(self, done: int, steps: int, state: Mapping[str, Any], recent: float) -> None:
        """A look at the running job: step, phase, release, reward curve."""
        shares = [self._share(float(value)) for value in state.get("rewards", [])]
        self._curve = f"{self._name} {sparkline(shares)} {shares[-1]:.2f}" if shares else f"{self._name} so far {recent:.2f}"
        head = state["head"]
        queued = state["counts"].get("queued", 0)
        self._phase = f"step {done}/{steps}   release {head}   {state['state']} {state.get('phase', '')}   {queued} waiting"
        if self._live is None and time.monotonic() - self._printed > _EVERY_S:
            self._printed = time.monotonic()
            self._line(f"{self._phase}   {self._curve}")

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _line(self, text: str) -> None:
        if self._live is None:
            self._console.print(f"demo: {text}", soft_wrap=True)

    def _draw(self) -> Text:
        return Text("\n").join(
            [Text(fact, style="green") for fact in self._facts] + [Text(self._phase), Text(self._curve, style="cyan")]
        )


def sparkline(values: list[float], width: int = 40) -> str:
    """The last values as bars between 0 and 1."""
    return "".join(_BARS[min(7, max(0, int(value * 8)))] for value in values[-width:])


def table(result: "Result", scene: Scene) -> None:
    """The end table: score, release and one sample answer before, after and after the rollback."""
    console = Console(file=sys.stdout, highlight=False)
    told = "scored answers" if scene.says is None else "answers and what was said to them"
    grid = Table(title=f"{result.steps} steps, {result.asked} {told}, {result.seconds:.0f} s")
    for column in ("", "held-out score", "95 % interval", "release", f"answer to {result.samples['item']}"):
        grid.add_column(column, justify="left")
    rows = (
        ("before", result.before, result.release_before, result.samples["before"]),
        ("after", result.after, result.release_after, result.samples["after"]),
        ("rolled_back", result.rolled_back, result.release_rolled_back, result.samples["rolled_back"]),
    )
    for name, score, release, answer in rows:
        low, high = result.intervals[name]
        grid.add_row(name.replace("_", " "), f"{score:.2f}", f"{low:.2f} to {high:.2f}", release, Text(answer[:160]))
    console.print(grid)
    if scene.says is not None:
        said = f"{scene.says.request!r} or {scene.says.thanks!r}"
        console.print(f"Nobody reported anything. The user said {said}; {scene.curve} by step:")
        console.print(f"{sparkline(result.rewards)}  {' '.join(f'{share:.2f}' for share in result.rewards)}")
    console.print(f"Full gate after learning: {result.gate}")
    same = "the same tokens as before" if result.same_tokens_after_rollback else "NOT the tokens from before"
    console.print(f"After the rollback the model gives {same}.")
