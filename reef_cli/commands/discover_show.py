"""Live progress of `reef discover`: a panel on a terminal, a line per step elsewhere, nothing with `--json`."""

import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from reef_cli.control.plain import plain

if TYPE_CHECKING:
    from reef_cli.discovery.run import Progress

_EVERY_S = 15.0


class Show:
    """Progress on stderr."""

    def __init__(self, *, quiet: bool, steps: int) -> None:
        self._quiet = quiet
        self._steps = steps
        self._done = 0
        self._now = ""
        self._curve = ""
        self._printed = time.monotonic()
        self._live: Any = None
        if not quiet and sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(stderr=True, highlight=False), refresh_per_second=4, get_renderable=self._draw)
            self._live.start()

    def progress(self, at: "Progress") -> None:
        """A look at the step under way."""
        what = f"{at.done}/{at.total} tries" if at.phase == "search" else f"training {at.note}".rstrip()
        self._now = f"step {at.step} ({self._done + 1} of {self._steps})   {what}   best {at.best:.9f}"
        if self._live is None and time.monotonic() - self._printed > _EVERY_S:
            self._line(self._now)

    def step(self, row: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> None:
        """A step is over."""
        from reef_cli.discovery.pictures import bars

        self._done += 1
        self._curve = f"best {bars([float(one['best']) for one in history])} {row['best']:.9f}"
        note = "trained" if row.get("trained") else f"not trained {row['untrained']}" if "untrained" in row else "not trained"
        if self._live is None:
            self._line(f"step {row['step']}: {row['valid']} of {row['rollouts']} valid, best {row['best']:.9f}, {note}")

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _line(self, text: str) -> None:
        self._printed = time.monotonic()
        if not self._quiet:
            print(f"discover: {plain(text)}", file=sys.stderr, flush=True)

    def _draw(self) -> Any:
        from rich.text import Text

        return Text(f"{self._now}\n{self._curve}")
