"""The table of two scenarios that learned side by side, from the benchmark's result file."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from docs_pages.markdown import table as markdown

WHO = ("brief", "talkative")


def table(path: Path) -> str:
    """What each scenario's users want, by whose model answered; empty without results."""
    if not path.exists():
        return "Not run yet.\n"
    result = json.loads(path.read_text(encoding="utf-8"))
    found, seeds = result["table"], len(result["runs"])
    rows = [(who, *(_shown(found[f"{who}, {wanted}, sampled"]) for wanted in WHO)) for who in ("untouched", *WHO)]
    head = (f"answered by ({seeds} seed{'s' if seeds > 1 else ''})", "exactly one sentence", "goes on after the first")
    same = found["chains equal to those alone, bit for bit"]
    told = f"Chains equal to those learned alone: {same}. Untouched answers as before: {found['untouched answers as before']}."
    few = "" if seeds > 2 else " So few seeds are a first look: they say nothing about how much another run would differ."
    return f"{markdown(head, rows)}\n\n{told}{few}\n"


def _shown(row: Mapping[str, Any]) -> str:
    low, high = row["interval"] or (row["mean"], row["mean"])
    return f"{row['mean']:.2f}" + (f" ({low:.2f} to {high:.2f})" if high > low else "")
