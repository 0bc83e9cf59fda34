"""Numbers as block characters: one line for a table cell, several for the job panel. Pure."""

from collections.abc import Sequence

_BLOCKS = " ▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int) -> str:
    """The last `width` values in one line of blocks; equal values are drawn at mid height."""
    shown = list(values)[-width:] if width > 0 else []
    return "".join(_BLOCKS[max(1, round(1 + level * 7))] for level in _levels(shown))


def chart(values: Sequence[float], width: int, height: int) -> list[str]:
    """`height` lines of blocks, the highest first, each column one value (the last `width`)."""
    if not values or width < 1 or height < 1:
        return []
    eighths = [max(1, round(level * height * 8)) for level in _levels(list(values)[-width:])]
    rows = range(height - 1, -1, -1)
    return ["".join(_BLOCKS[min(8, max(0, fill - row * 8))] for fill in eighths) for row in rows]


def bar(done: int, total: int, width: int) -> str:
    """A progress bar of `width` cells."""
    share = min(1.0, max(0.0, done / total)) if total > 0 else 0.0
    filled = round(share * width)
    return "━" * filled + "─" * (width - filled)


def _levels(values: Sequence[float]) -> list[float]:
    """Values scaled to 0..1 over their own range."""
    if not values:
        return []
    low, high = min(values), max(values)
    return [0.5 if high == low else (value - low) / (high - low) for value in values]
