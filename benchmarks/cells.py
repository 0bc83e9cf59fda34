"""What benchmarks of cells share: a cell is one arm with one seed and a server of its own, run once and kept in a results file.

A `Campaign` names its arms, per recipe the recipe's own, its ablations and its control, and runs cells seed by seed. The file
holds the cells and, made of them, the table the recipes' pages show: per recipe and arm the seeds, the mean and the 95 %
interval of the held-out scores.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.sao_cpu import interval

Cells = Mapping[str, Mapping[str, Any]]
"""Finished cells by `arm/seed`."""


@dataclass(frozen=True)
class Campaign:
    """`run` makes the cell of an arm, a seed and a number of steps with a model (None: the default one), as a dataclass."""

    title: str
    results: Path
    steps: int
    facts: Mapping[str, Any]
    about: Mapping[str, str]
    """What each arm is, in the tables."""
    plan: Mapping[str, tuple[str, ...]]
    """Per recipe: itself, its ablations, its control; `frozen` is every recipe's last arm."""
    run: Callable[[str, int, int, str | None], Any]

    def keep(self, path: Path, cells: Cells, steps: int) -> None:
        """The results file: cells, and the table made of them."""
        path.parent.mkdir(exist_ok=True)
        last = list(cells.values())[-1]
        payload = {"machine": last["machine"], "steps": steps, **self.facts, "table": self.table(cells), "cells": cells}
        path.write_text(json.dumps(payload, indent=1) + "\n")

    def table(self, cells: Cells) -> dict[str, Any]:
        """Arms without a cell have no more than their name and 0 seeds."""
        found: dict[str, Any] = {}
        for recipe, (own, *ablations, control) in self.plan.items():
            roles = ["ablation", *(f"ablation {i}" for i in range(2, len(ablations) + 1))]
            rows = {"recipe": own, **dict(zip(roles, ablations, strict=True)), "control": control, "frozen": "frozen"}
            found[recipe] = {role: self._summary(cells, arm) for role, arm in rows.items()}
        return found

    def _summary(self, cells: Cells, arm: str) -> dict[str, Any]:
        mine = [cell for cell in cells.values() if cell["arm"] == arm]
        shown: dict[str, Any] = {"arm": arm, "about": self.about[arm], "seeds": len(mine)}
        if not mine:
            return shown
        shown["minutes"] = round(statistics.fmean(float(cell["seconds"]) for cell in mine) / 60, 1)
        shown["step_seconds"] = round(statistics.fmean(float(cell["step_seconds"]) for cell in mine), 1)
        for what in ("sampled", "greedy"):
            values = [float(cell[what]) for cell in mine]
            shown[what] = round(statistics.fmean(values), 3)
            shown[f"{what}_by_seed"] = {str(cell["seed"]): round(float(cell[what]), 3) for cell in mine}
            # A single run has no interval.
            shown[f"{what}_interval"] = [round(edge, 3) for edge in interval(values)] if len(values) > 1 else None
        return shown

    def show(self, cells: Cells) -> None:
        """The table on the terminal."""
        for recipe, rows in self.table(cells).items():
            print(recipe)
            for role, row in rows.items():
                text = "not run" if not row["seeds"] else f"T=1 {row['sampled']:.3f} {row['sampled_interval'] or ''}"
                greedy = "" if not row["seeds"] else f"  greedy {row['greedy']:.3f}"
                print(f"  {role:10} {row['arm']:16} seeds {row['seeds']}  {text}{greedy}")

    def wanted(self, seeds: int, named: list[str] | None, cells: Cells) -> list[str]:
        """Cells to run, seed by seed so that every recipe has a first number early; those that are there are left out."""
        arms = list(dict.fromkeys(["frozen", *(arm for row in self.plan.values() for arm in row)]))
        # A frozen model's greedy and seeded answers do not depend on the seed.
        every = [f"{arm}/{seed}" for seed in range(seeds) for arm in arms if arm != "frozen" or seed == 0]
        return [cell for cell in named or every if cell not in cells]

    def main(self) -> None:
        """The command line of such a benchmark."""
        parser = argparse.ArgumentParser(description=self.title)
        parser.add_argument("--seeds", type=int, default=3)
        parser.add_argument("--steps", type=int, default=self.steps)
        parser.add_argument("--cells", nargs="+", help="arm/seed; default: all")
        parser.add_argument("--minutes", type=float, default=1e9, help="start no cell that would not end within this budget")
        parser.add_argument("--model")
        parser.add_argument("--json", type=Path, default=self.results)
        parser.add_argument("--table", action="store_true", help="make the table anew, show it and run nothing")
        args = parser.parse_args()
        cells = stored(args.json)
        deadline = time.monotonic() + 60 * args.minutes
        longest = 0.0
        for name in [] if args.table else self.wanted(args.seeds, args.cells, cells):
            if time.monotonic() + longest > deadline:
                print(f"the budget of {args.minutes:g} minutes is used up before {name}")
                break
            arm, _, seed = name.partition("/")
            cell = self.run(arm, int(seed), args.steps, args.model)
            longest = max(longest, cell.seconds)
            # Read again: another run may have finished cells of its own meanwhile.
            cells = {**stored(args.json), name: asdict(cell)}
            self.keep(args.json, cells, args.steps)
            print(f"{name}: T=1 {cell.sampled:.3f}, greedy {cell.greedy:.3f}, {cell.seconds:.0f} s", flush=True)
        if args.table and cells:
            self.keep(args.json, cells, args.steps)
        self.show(cells)


def stored(path: Path) -> dict[str, dict[str, Any]]:
    """The cells of a results file."""
    return dict(json.loads(path.read_text())["cells"]) if path.exists() else {}
