"""Scores of releases as a picture: a bar of characters, a self-contained SVG or HTML page, a PNG where matplotlib is.

Every release has its mean and interval on one axis from 0 to 1; a vertical line marks the first release's mean.
"""

import html
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reef_cli.control.plain import one_line
from reef_cli.core.errors import MissingDependency, StorageError, UsageError

WIDTH = 41
_ROW, _LEFT, _SPAN, _TOP = 26, 190, 480, 64


@dataclass(frozen=True, slots=True)
class Point:
    """One release's score; `mean` None when no item was answered."""

    name: str
    mean: float | None
    low: float
    high: float
    note: str = ""


def points_of(answer: Mapping[str, Any]) -> list[Point]:
    """The releases of an evaluation's answer, with what their difference to the first one shows."""
    notes = {row["release"]: f"{row['mean']:+.3f} {row['result']}" for row in answer.get("differences", ())}
    points = []
    for row in answer.get("releases", ()):
        low, high = row["interval"]
        points.append(Point(str(row["release"]), row["mean"], low, high, notes.get(row["release"], "")))
    return points


def bar(point: Point, width: int = WIDTH) -> str:
    """The interval as a line with the mean in it: `···├──●──┤···`."""
    if point.mean is None:
        return "?" * 3
    cells = ["·"] * width
    low, mean, high = (round(min(1.0, max(0.0, value)) * (width - 1)) for value in (point.low, point.mean, point.high))
    cells[low : high + 1] = "─" * (high - low + 1)
    cells[low], cells[high] = "├", "┤"
    cells[mean] = "●"
    return "".join(cells)


def save(path: Path, answer: Mapping[str, Any]) -> None:
    """Write the picture; the ending says which kind. `UsageError` for another ending, `MissingDependency` for a PNG."""
    title = f"{answer.get('suite', 'suite')}, {answer.get('split', '')} items, scenario {answer.get('scenario', '')}"
    points = points_of(answer)
    kinds = {".svg": svg, ".html": page}
    try:
        if path.suffix == ".png":
            _png(path, points, title)
        elif path.suffix in kinds:
            path.write_text(kinds[path.suffix](points, title), encoding="utf-8")
        else:
            raise UsageError(f"{path.name} has no ending of a plot", why="one of .svg, .html, .png", hint="name another file")
    except OSError as error:
        if isinstance(error, MissingDependency | UsageError):
            raise
        raise StorageError(f"cannot write {path}", why=error.strerror or str(error), hint="choose another place") from error


def svg(points: Sequence[Point], title: str) -> str:
    """The picture as SVG; no script, no font, no address outside it."""
    height = _TOP + _ROW * len(points) + 34
    bottom = height - 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="860" height="{height}" viewBox="0 0 860 {height}" '
        'font-family="sans-serif" font-size="13" role="img">',
        f'<rect width="860" height="{height}" fill="#fff"/>',
        _text(16, 26, title, size=15),
    ]
    for tick in range(6):
        x = _x(tick / 5)
        parts.append(f'<path d="M{x} {_TOP - 12}V{bottom}" stroke="#ddd"/>')
        parts.append(_text(x, bottom + 18, f"{tick / 5:.1f}", anchor="middle"))
    if points and points[0].mean is not None:
        x = _x(points[0].mean)
        parts.append(f'<path d="M{x} {_TOP - 12}V{bottom}" stroke="#888" stroke-dasharray="4 3"/>')
    for index, point in enumerate(points):
        parts += _row(point, _TOP + _ROW * index + 8)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _row(point: Point, y: int) -> list[str]:
    name = _text(16, y + 4, point.name)
    if point.mean is None:
        return [name, _text(_LEFT, y + 4, "no answers")]
    low, mean, high = _x(point.low), _x(point.mean), _x(point.high)
    colour = "#1a7f37" if point.note.endswith("better") else "#b42318" if point.note.endswith("worse") else "#35507a"
    return [
        name,
        f'<path d="M{low} {y}H{high}M{low} {y - 5}v10M{high} {y - 5}v10" stroke="{colour}" stroke-width="2"/>',
        f'<circle cx="{mean}" cy="{y}" r="4.5" fill="{colour}"/>',
        _text(_LEFT + _SPAN + 14, y + 4, f"{point.mean:.3f}  {point.note}"),
    ]


def page(points: Sequence[Point], title: str) -> str:
    """A page with the picture and the numbers under it."""
    rows = "".join(
        f"<tr><td>{_safe(p.name)}</td><td>{'-' if p.mean is None else f'{p.mean:.3f}'}</td>"
        f"<td>{p.low:.3f} to {p.high:.3f}</td><td>{_safe(p.note)}</td></tr>\n"
        for p in points
    )
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{_safe(title)}</title>\n'
        "<style>body{font-family:sans-serif;margin:2em}td,th{padding:.2em 1em .2em 0;text-align:left}</style>\n"
        f"{svg(points, title)}"
        f"<table><tr><th>release</th><th>mean</th><th>interval</th><th>against the first</th></tr>\n{rows}</table></html>\n"
    )


def _png(path: Path, points: Sequence[Point], title: str) -> None:
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise MissingDependency(
            "a PNG needs matplotlib", why="the package is not installed", hint="pip install 'reef-cli[plot]', or name an .svg"
        ) from error
    figure = figures.Figure(figsize=(8.6, 1.2 + 0.3 * len(points)), layout="constrained")
    axes = figure.add_subplot()
    known = [(index, point) for index, point in enumerate(points) if point.mean is not None]
    for index, point in known:
        axes.plot([point.low, point.high], [index, index], color="#35507a", marker="|")
        axes.plot([point.mean], [index], color="#35507a", marker="o")
        axes.annotate(one_line(point.note), (1.01, index), annotation_clip=False, va="center", fontsize=8)
    if points and points[0].mean is not None:
        axes.axvline(points[0].mean, color="#888888", linestyle="--", linewidth=1)
    axes.set_yticks(range(len(points)), [one_line(point.name) for point in points])
    axes.set_ylim(len(points) - 0.5, -0.5)
    axes.set_xlim(0, 1)
    axes.set_title(one_line(title), fontsize=10)
    figure.savefig(path, format="png")


def _x(value: float) -> float:
    return round(_LEFT + _SPAN * min(1.0, max(0.0, value)), 1)


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 13) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="{size}">{_safe(text)}</text>'


def _safe(text: str) -> str:
    return html.escape(one_line(text))
