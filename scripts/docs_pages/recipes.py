"""What each recipe was measured to learn, beside its ablations, its control and the frozen model."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from docs_pages.compare import Measured, sentence
from docs_pages.machines import where
from docs_pages.markdown import table as markdown

HEADER = ("", "what it does", "held-out at temperature 1 (seeds)", "95 % interval", "greedy", "minutes a run")


def table(file: Path, folder: str) -> str:
    """The tables of one recipe's variants; arms that have not run are named, and what the recipe is not ahead of."""
    if not file.exists():
        return f"Not run: `benchmarks/{file.stem}.py`."
    result = json.loads(file.read_text(encoding="utf-8"))
    found = {name: rows for name, rows in result["table"].items() if name.split()[0] == folder}
    parts = [_variant(name if len(found) > 1 else "", rows) for name, rows in found.items()]
    arms = {row["arm"] for rows in found.values() for row in rows.values()}
    ran = where(cell["machine"] for cell in result["cells"].values() if cell["arm"] in arms)
    budget = f"{result['steps']} steps of {result['batch']} answers"
    return "\n\n".join([*parts, f"{budget}, {ran}; `benchmarks/results/{file.name}`."])


def _variant(name: str, rows: Mapping[str, Mapping[str, Any]]) -> str:
    if not rows["recipe"]["seeds"]:
        return f"**{name or rows['recipe']['arm']}** has not been run."
    run = [(f"{role}: `{row['arm']}`", row) for role, row in rows.items() if row["seeds"]]
    left = [f"`{row['arm']}`" for row in rows.values() if not row["seeds"]]
    text = markdown(HEADER, [(label, *_cells(row)) for label, row in run])
    head = f"**{name}**\n\n" if name else ""
    parts = [text.rstrip(), _verdict(rows), f"Not run: {', '.join(left)}." if left else ""]
    return head + "\n\n".join(part for part in parts if part)


def _verdict(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Beside the control, the ablations and the frozen model, by rule."""
    own, *others = [
        Measured(row["arm"], row["sampled"], row["sampled_interval"], row["arm"] == "frozen")
        for row in rows.values()
        if row["seeds"]
    ]
    return sentence(own, others) if others else ""


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    seeds = ", ".join(f"{value:.2f}" for _, value in sorted(row["sampled_by_seed"].items()))
    interval = row["sampled_interval"]
    alone = "the same for every seed" if row["arm"] == "frozen" else "one run"
    shown = f"{interval[0]:.2f} to {interval[1]:.2f}" if interval else alone
    return row["about"], f"{row['sampled']:.2f} ({seeds})", shown, f"{row['greedy']:.2f}", f"{row['minutes']:.1f}"
