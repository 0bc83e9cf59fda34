"""What a run looks like: best-so-far as text for a terminal and as SVG, and one HTML page with curve, facts and solution."""

import html
from collections.abc import Mapping, Sequence
from typing import Any

_BARS = "▁▂▃▄▅▆▇█"
WIDTH, HEIGHT, MARGIN = 640, 260, 56


def bars(values: Sequence[float], width: int = 60) -> str:
    """The last values as bars between their smallest and largest."""
    shown = list(values)[-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    scale = (high - low) or 1.0
    return "".join(_BARS[min(7, int((value - low) / scale * 8))] for value in shown)


def chart(values: Sequence[float], width: int = 60, height: int = 10) -> str:
    """Best-so-far over the steps as lines of text, with the smallest and largest value at the side."""
    if not values:
        return ""
    width = min(width, len(values))
    shown = [values[round(i * (len(values) - 1) / max(1, width - 1))] for i in range(width)]
    low, high = min(shown), max(shown)
    scale = (high - low) or 1.0
    levels = [round((value - low) / scale * (height - 1)) for value in shown]
    rows = []
    for level in range(height - 1, -1, -1):
        label = f"{low + scale * level / (height - 1):.6f}" if level in (0, height - 1) else ""
        rows.append(f"{label:>10} │" + "".join("●" if at == level else "·" if at > level else " " for at in levels))
    return "\n".join([*rows, f"{'':>10} └" + "─" * width, f"{'':>12}step 1 to {len(values)}"])


def curve(history: Sequence[Mapping[str, Any]], title: str) -> str:
    """SVG: the best strict value after each step, and each step's best try."""
    best = [float(row["best"]) for row in history]
    tops = [float(row["top"]) for row in history]
    values = [value for value in (*best, *tops) if value > 0] or [0.0, 1.0]
    low, high = min(values), max(values)
    scale = (high - low) or 1.0

    def x(index: int) -> float:
        return MARGIN + (WIDTH - 2 * MARGIN) * index / max(1, len(history) - 1)

    def y(value: float) -> float:
        return HEIGHT - MARGIN / 2 - (HEIGHT - MARGIN) * (value - low) / scale

    line = " ".join(f"{x(i):.1f},{y(value):.1f}" for i, value in enumerate(best))
    dots = "".join(f'<circle cx="{x(i):.1f}" cy="{y(v):.1f}" r="2.5"/>' for i, v in enumerate(tops) if v > 0)
    marks = "".join(
        f'<text x="4" y="{y(value) + 4:.1f}">{value:.6f}</text><line x1="{MARGIN}" x2="{WIDTH - MARGIN}" y1="{y(value):.1f}"'
        f' y2="{y(value):.1f}" stroke="currentColor" stroke-opacity="0.2"/>'
        for value in (low, high)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
        f' font-family="sans-serif" font-size="10" fill="currentColor"><title>{html.escape(title)}</title>{marks}'
        f'<g fill="#999">{dots}</g><polyline points="{line}" fill="none" stroke="#c0392b" stroke-width="2"/>'
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 4}" text-anchor="middle">steps 1 to {len(history)}</text></svg>'
    )


def page(title: str, facts: Mapping[str, object], history: Sequence[Mapping[str, Any]], drawing: str) -> str:
    """A page that needs nothing else."""
    rows = "".join(f"<tr><th>{html.escape(name)}</th><td>{html.escape(str(fact))}</td></tr>" for name, fact in facts.items())
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        "<style>body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem}"
        "th{text-align:left;font-weight:600;padding-right:1.5rem;vertical-align:top}td{font-family:ui-monospace,monospace}</style>"
        f"<h1>{html.escape(title)}</h1><table>{rows}</table><h2>Best so far</h2>{curve(history, title)}"
        f"<h2>Best solution</h2>{drawing}</html>\n"
    )
