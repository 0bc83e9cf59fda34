"""What `reef demo` was measured to do, run by run: held-out scores before, after and after the rollback, and the curve."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from docs_pages.machines import where
from docs_pages.markdown import table as markdown

HEADER = ("seed", "held-out before", "after", "95 % interval", "after the rollback", "steps", "minutes", "acceptance by step")


def table(file: Path, recipe: str) -> str:
    """All runs of one recipe's demo."""
    runs = json.loads(file.read_text(encoding="utf-8"))["runs"] if file.exists() else []
    mine = [run for run in runs if run["recipe"] == recipe]
    if not mine:
        return f"Not run: `python benchmarks/demo.py --recipe {recipe} --seeds 0 1 2`."
    rows = [
        (
            run["seed"],
            f"{run['before']:.2f}",
            f"{run['after']:.2f}",
            " to ".join(f"{edge:.2f}" for edge in run["intervals"]["after"]),
            f"{run['rolled_back']:.2f}{', the same tokens' if run['same_tokens_after_rollback'] else ''}",
            run["steps"],
            f"{run['seconds'] / 60:.0f}",
            " ".join(f"{value:.2f}" for value in run["rewards"]),
        )
        for run in mine
    ]
    ran = where(run["machine"] for run in mine)
    return f"{markdown(HEADER, rows)}\n\n{_told(mine)}\n\n{ran}; `benchmarks/results/demo.json`."


def _told(runs: Sequence[Mapping[str, Any]]) -> str:
    """In how many runs the interval after lies above what was held before."""
    better = sum(run["intervals"]["after"][0] > run["before"] for run in runs)
    text = f"Better than before in {better} of {len(runs)} runs: the interval after lies above the score before."
    return text if better == len(runs) else f"**{text}**"
