"""The gate's error rates and power by simulation, beside the naive rule "more wins than losses on 3 tasks, 1 episode each".

Run: `python -m benchmarks.gate [--runs 2000] [--out benchmarks/results/gate.json]`. Scores are 0 or 1; an item is discordant
when exactly one side passes. "Identical" candidates win and lose equally often; a 5- or 10-point effect shifts that balance.
Each run looks after every pair and stops as soon as the test says anything, as the gate does. Fixed seeds.
"""

import argparse
import json
import os
import platform
import random
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from reef_cli.evaluation.decide import binary_result

SIZES = (10, 30, 100, 300, 1000)
ALPHA = 0.05


@dataclass(frozen=True, slots=True)
class Row:
    """One cell: shares of runs that end in each result, and how many items they used."""

    effect_points: int
    discordant: float
    items: int
    better: float
    worse: float
    open: float
    median_items: int


def simulate(items: int, effect: float, discordant: float, runs: int) -> Row:
    """`effect` is the true mean difference; wins and losses together happen with chance `discordant`."""
    draw = random.Random(f"{items} {effect} {discordant}")
    win, loss = (discordant + effect) / 2, (discordant - effect) / 2
    counts = {"better": 0, "worse": 0, "open": 0}
    used = []
    for _ in range(runs):
        result, count = one_run(draw, items, win, loss)
        counts[result] += 1
        used.append(count)
    shares = {name: value / runs for name, value in counts.items()}
    return Row(round(100 * effect), discordant, items, **shares, median_items=sorted(used)[runs // 2])


def one_run(draw: random.Random, items: int, win: float, loss: float) -> tuple[str, int]:
    wins = losses = 0
    for count in range(1, items + 1):
        dice = draw.random()
        if dice >= win + loss:
            continue
        wins, losses = (wins + 1, losses) if dice < win else (wins, losses + 1)
        if (result := binary_result(wins, losses, ALPHA)) != "open":
            return result, count
    return "open", items


def naive(effect: float, runs: int) -> float:
    """How often "wins > losses on 3 tasks" publishes a candidate of pass rate 0.5 + effect against 0.5."""
    draw = random.Random(f"naive {effect}")
    published = 0
    for _ in range(runs):
        balance = sum((draw.random() < 0.5 + effect) - (draw.random() < 0.5) for _ in range(3))
        published += balance > 0
    return published / runs


def machine() -> dict[str, object]:
    shown = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {"python": platform.python_version(), "machine": platform.machine(), "cpus": os.cpu_count(), "commit": shown}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    started = time.perf_counter()
    rows = [
        simulate(items, effect, discordant, options.runs)
        for effect in (0.0, 0.05, 0.10)
        for discordant in (0.1, 0.2, 0.3, 0.5)
        if discordant > effect
        for items in SIZES
    ]
    rules = {f"{round(100 * effect)}": naive(effect, options.runs) for effect in (0.0, 0.05, 0.10)}
    false = max(row.better for row in rows if row.effect_points == 0)
    for row in rows:
        print(
            f"effect {row.effect_points:>2} points  discordant {row.discordant:.1f}  items {row.items:>4}"
            f"  better {row.better:6.3f}  worse {row.worse:6.3f}  median items {row.median_items:>4}"
        )
    print(f"identical candidates published: at most {false:.3f} (bar 0.05); naive rule {rules['0']:.3f}")
    result = {
        "what": "sequential betting gate, alpha 0.05, binary pairs",
        "runs": options.runs,
        "false_publish_max": false,
        "naive_published": rules,
        "rows": [asdict(row) for row in rows],
        "seconds": round(time.perf_counter() - started, 1),
        **machine(),
    }
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    if false > ALPHA:
        raise SystemExit(f"false publish rate {false} is above {ALPHA}")


if __name__ == "__main__":
    main()
