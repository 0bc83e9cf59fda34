"""The gate's error rates and power as a table, from the simulation's own result file."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# How often exactly one side passes an item; the result file has more of them.
DISCORDANT = 0.2


def table(results: Path) -> str:
    """Share of runs that publish, by true effect and number of items."""
    found = json.loads((results / "gate.json").read_text(encoding="utf-8"))
    return "\n".join(_lines(found)) + "\n"


def _lines(found: dict[str, Any]) -> Iterator[str]:
    rows = [row for row in found["rows"] if row["discordant"] == DISCORDANT]
    sizes = sorted({row["items"] for row in rows})
    yield f"| true effect | {' | '.join(f'{size} items' for size in sizes)} | 3 tasks, more wins than losses |"
    yield f"|---|{'---|' * len(sizes)}---|"
    for effect in sorted({row["effect_points"] for row in rows}):
        cells = {row["items"]: row["better"] for row in rows if row["effect_points"] == effect}
        shares = " | ".join(f"{100 * cells[size]:.1f} %" for size in sizes)
        name = "none: published by mistake" if effect == 0 else f"{effect} points"
        yield f"| {name} | {shares} | {100 * found['naive_published'][str(effect)]:.1f} % |"
    yield ""
    worst = f"worst false rate over all cells {100 * found['false_publish_max']:.1f} %"
    yield f"{found['runs']} runs a cell, items decided differently in {DISCORDANT:.0%} of cases; {worst} (`gate.json`)."
