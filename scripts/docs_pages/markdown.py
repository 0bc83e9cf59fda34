"""Tables in Markdown."""

from collections.abc import Iterable, Sequence
from typing import Any


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table; bars in cells are escaped."""
    lines = [_row(columns), "|" + "---|" * len(columns)]
    return "\n".join([*lines, *(_row(row) for row in rows)])


def _row(cells: Sequence[Any]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def code(value: Any) -> str:
    """`value` as inline code; nothing for nothing."""
    return f"`{value}`" if str(value) else ""
