"""What commands print: aligned tables on a terminal, tab-separated lines when piped, JSON with `--json`.

Data goes to stdout, narration to stderr. Everything passes through `control.plain`, since records hold what models wrote.
Rich is imported only for a table on a terminal.
"""

import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

from reef_cli.control.plain import one_line, plain


def on_terminal() -> bool:
    """Whether stdout is a terminal that can draw."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def as_json(data: Any) -> None:
    """One JSON document on stdout; ASCII, so that nothing in it can drive a terminal."""
    print(json.dumps(data, indent=2, default=str))


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Rows under `columns`. Piped: one line a row, tabs between the cells, no heading."""
    cells = [[one_line("" if cell is None else cell) for cell in row] for row in rows]
    if not on_terminal():
        for row in cells:
            print("\t".join(row))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for index, column in enumerate(columns):
        drawn.add_column(
            column, overflow="ellipsis" if index == len(columns) - 1 else "fold", no_wrap=index == len(columns) - 1
        )
    for row in cells:
        drawn.add_row(*(Text(cell) for cell in row))
    Console(highlight=False).print(drawn)


def pairs(facts: Iterable[tuple[str, object]]) -> None:
    """Facts of one thing, a line each; those that are None are left out."""
    shown = [(name, fact) for name, fact in facts if fact is not None]
    width = max((len(name) for name, _ in shown), default=0) if on_terminal() else 0
    for name, fact in shown:
        separator = " " * (width - len(name) + 2) if width else "\t"
        print(f"{name}{separator}{one_line(fact)}")


def block(text: object) -> None:
    """Text of several lines, made harmless."""
    print(plain(text))


def say(text: str) -> None:
    """Narration: stderr."""
    print(plain(text), file=sys.stderr)


def age(at: float | None, now: float | None = None) -> str:
    """How long ago, in one unit: `12s`, `4m`, `3h`, `2d`."""
    if at is None:
        return "-"
    seconds = max(0.0, (time.time() if now is None else now) - at)
    for limit, unit, divisor in ((90, "s", 1), (5400, "m", 60), (172800, "h", 3600)):
        if seconds < limit:
            return f"{seconds / divisor:.0f}{unit}"
    return f"{seconds / 86400:.0f}d"


def size(count: float | None) -> str:
    """Bytes in binary units."""
    if count is None:
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def number(value: object, digits: int = 3) -> str:
    """A number for a table, or `-`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.{digits}f}"
