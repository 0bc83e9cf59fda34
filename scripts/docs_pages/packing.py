"""What each arm of the packing search reached at equal numbers of verified tries, and what the learning arm is ahead of."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from docs_pages.compare import Measured, sentence
from docs_pages.machines import where
from docs_pages.markdown import table as markdown

HEADER = (
    "circles",
    "arm",
    "best strict sum: mean",
    "95 % interval",
    "by seed",
    "tries to the best known",
    "lines valid",
    "minutes",
)

GROUPS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "tttd": ("tttd", ("puct", "best_of_n", "restarts", "random")),
    "guidance_ttt": ("guidance_ttt", ("guide", "puct")),
}
"""Per recipe: its learning arm, and those it is measured against."""


def table(file: Path, recipe: str) -> str:
    """The recipe's arms, best first for each space and size."""
    if not file.exists():
        return "Not run: `benchmarks/packing.py`."
    result = json.loads(file.read_text(encoding="utf-8"))
    own, others = GROUPS[recipe]
    parts = [part for space in ("lines", "walks") if (part := _space(result, space, own, others))]
    known = ", ".join(f"{value} for {n}" for n, value in result["best_known"].items())
    machines = [row["machine"] for row in result["arms"] if row["arm"] in (own, *others)]
    ran = where(machines) if machines else ""
    return "\n\n".join([*parts, f"{ran}; `benchmarks/results/packing.json`. Best known: {known}."])


def _space(result: Mapping[str, Any], space: str, own: str, others: tuple[str, ...]) -> str:
    """One space's table and, where the learning arm ran in it, the verdicts; empty when nothing ran."""
    sizes = [one for one in result["table"] if one["space"] == space]
    rows, told = [], []
    for size in sizes:
        arms = {name: row for name, row in size["arms"].items() if name in (own, *others)}
        for name, row in sorted(arms.items(), key=lambda item: -item[1]["mean"]):
            rows.append((size["n"], f"`{name}`", *_cells(row)))
        measured = {name: Measured(name, row["mean"], row["interval"]) for name, row in arms.items()}
        if own in measured:
            beside = [measured[name] for name in others if name in measured]
            told += [f"{size['n']} circles: {sentence(measured[own], beside)}"] if beside else []
            left = [f"`{name}`" for name in others if name not in measured]
            told += [f"{size['n']} circles, not run: {', '.join(left)}."] if left else []
    if not rows:
        return ""
    tries = ", ".join(f"{size['tries']} tries for {size['n']}" for size in sizes)
    return "\n\n".join([f"Space `{space}`, equal tries in every arm: {tries}.", markdown(HEADER, rows), *told])


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    interval, known = row["interval"], [str(tries) if tries else "no" for tries in row["known"]]
    shown = f"{interval[0]:.4f} to {interval[1]:.4f}" if interval else "one run"
    seeds = ", ".join(f"{value:.6f}" for value in row["best"])
    return f"{row['mean']:.6f}", shown, seeds, ", ".join(known), f"{100 * row['valid']:.0f} %", f"{row['minutes']:.1f}"
