"""What each arm of the packing search reached, at how many verified tries."""

import json
from pathlib import Path

from docs_pages.markdown import table as markdown

HEADER = ("circles", "arm", "seed", "verified tries", "valid", "best strict sum", "tries to the best known", "minutes")


def table(file: Path) -> str:
    """All arms of a result file, best first for each size."""
    result = json.loads(file.read_text(encoding="utf-8"))
    rows = [
        (
            row["n"],
            f"`{row['arm']}`",
            row["seed"],
            row["tries"],
            row["valid"],
            f"{row['best_strict']:.9f}",
            row["tries_to_best_known"] or "",
            f"{row['seconds'] / 60:.1f}",
        )
        for row in sorted(result["arms"], key=lambda row: (row["n"], -row["best_strict"], row["tries"]))
    ]
    machine = result["machine"]
    told = f"Space `{result['space']}`, {machine['cores']} shared cores ({machine['cpu']}), commit {machine['commit']}"
    known = ", ".join(f"{value} for {n}" for n, value in result["best_known"].items())
    return f"{markdown(HEADER, rows)}\n\n{told}; `benchmarks/results/packing.json`. Best known: {known}."
