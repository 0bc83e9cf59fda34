"""Self-play on two CPU cores, end to end and at the same number of answers: sums of two numbers, proposed and solved.

Arms: the recipe; the same without what the proposer earns (`train_proposer: false`); without a proposer (tasks drawn at
random); the frozen model. A budget of answers is spent in generations, whatever an arm needs them for: proposals, attempts and
attempts with a hint all count, so an arm whose proposals are no tasks plays more generations. A step is taken when enough
samples wait, and played on after it. Measured on sums that no arm plays: at temperature 1 and greedily.

    python benchmarks/selfplay_cpu.py --seeds 3 --minutes 60
    python benchmarks/selfplay_cpu.py --cells selfplay/0 frozen/0
    python benchmarks/selfplay_cpu.py --table
"""

import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.cells import Campaign
from benchmarks.sao_cpu import machine
from recipes.selfplay.play import Game, Played, opened, solved
from recipes.selfplay.sums import Sums
from reef_cli.control.client import Client
from reef_cli.demo.server import Server
from reef_cli.discovery.desk import Desk

RESULTS = Path(__file__).parent / "results" / "selfplay_cpu.json"
ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "recipes/selfplay/examples/selfplay/serve.yaml"
SCENARIO = "selfplay"
ANSWERS, DRAWS = 56, 2
"""A full generation of the example: 8 proposals, 4 attempts at each and 2 more with a hint."""

HELD_OUT = 100
PATIENCE_S = 600.0


@dataclass(frozen=True)
class Arm:
    """What a cell serves with, and whether tasks are drawn in place of proposed."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    random_tasks: bool = False


ARMS: Mapping[str, Arm | None] = {
    "selfplay": Arm(),
    "selfplay-solver": Arm({"train_proposer": False}),
    "random-tasks": Arm({}, random_tasks=True),
    "frozen": None,
}
ABOUT: Mapping[str, str] = {
    "selfplay": "proposals earn regret, attempts their score",
    "selfplay-solver": "the proposer does not learn",
    "random-tasks": "tasks are drawn, only the solver learns",
    "frozen": "no learning",
}
PLAN: Mapping[str, tuple[str, ...]] = {"selfplay": ("selfplay", "selfplay-solver", "random-tasks")}


@dataclass
class Cell:
    """One arm with one seed. `rewards` are the mean scores of a generation's attempts, `tasks` how many it had."""

    arm: str
    seed: int
    steps: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    sampled: float = 0.0
    greedy: float = 0.0
    answers: int = 0
    rewards: list[float] = field(default_factory=list)
    tasks: list[int] = field(default_factory=list)
    regret: list[float] = field(default_factory=list)
    updates: int = 0
    skipped: list[str] = field(default_factory=list)
    step_seconds: float = 0.0
    seconds: float = 0.0
    machine: Mapping[str, str] = field(default_factory=dict)


class Kept(Sums):
    """Sums whose held-out ones are no tasks."""

    def __init__(self) -> None:
        dice = random.Random("held out")
        self.held_out = sorted({super(Kept, self).dice(dice) for _ in range(HELD_OUT)})

    def task(self, text: str) -> str | None:
        found = super().task(text)
        return None if found in self.held_out else found

    def dice(self, generator: random.Random) -> str:
        while (drawn := super().dice(generator)) in self.held_out:
            pass
        return drawn


def run(name: str, seed: int, steps: int, model: str | None) -> Cell:
    """One cell from an empty home to its held-out scores."""
    arm, problem = ARMS[name], Kept()
    cell = Cell(name, seed, steps, dict(arm.settings) if arm else {}, machine=machine())
    home = Path(tempfile.mkdtemp(prefix=f"reef-bench-{name}-{seed}-"))
    (home / "serve.yaml").write_text(configuration(arm or Arm(), seed, model))
    started = time.monotonic()
    server = Server(home, home / "serve.yaml", {})
    try:
        client = server.wait_ready(600.0, lambda _: None)
        game = opened(
            server.clone,
            SCENARIO,
            home / "tasks.jsonl",
            random_tasks=bool(arm and arm.random_tasks),
            seed=seed,
            problem=problem,
        )
        if arm is not None:
            play(cell, client, game, steps * ANSWERS)
        client.post(f"/reef/scenarios/{SCENARIO}/pause")
        for what, temperature, draws in (("sampled", 1.0, DRAWS), ("greedy", 0.0, 1)):
            desk = Desk(server.clone, SCENARIO, temperature=temperature)
            scores = [solved(desk, problem, problem.held_out, draw) for draw in range(draws)]
            setattr(cell, what, round(statistics.fmean(scores), 4))
    finally:
        server.stop()
        shutil.rmtree(home, ignore_errors=True)
    cell.seconds = round(time.monotonic() - started, 1)
    return cell


def configuration(arm: Arm, seed: int, model: str | None) -> str:
    """The example's serve.yaml with the arm's settings and an open gate: what is measured is the run itself, good or bad."""
    example = yaml.safe_load(EXAMPLE.read_text())
    example["reef"] |= {"gate_every": 1000, **arm.settings}
    example["engine"] |= {"model": model} if model else {}
    example["trainer"] |= {"seed": seed}
    return str(yaml.safe_dump({**example, "evaluation": {"smoke_items": 1}}))


def play(cell: Cell, client: Client, game: Game, budget: int) -> None:
    """Generations until the budget is spent; every step that can be taken is taken before the next."""
    while cell.answers < budget:
        played = game.generation()
        cell.answers += sum(map(answers, played))
        tried = [one.trial for one in played if one.trial]
        cell.tasks.append(len(tried))
        cell.rewards.append(round(statistics.fmean([trial.solved for trial in tried] or [0.0]), 4))
        cell.regret.append(round(statistics.fmean([trial.regret for trial in tried] or [0.0]), 4))
        settle(client)
        print(f"  {cell.arm}/{cell.seed} {cell.answers} answers, {len(tried)} tasks, solved {cell.rewards[-1]:.2f}", flush=True)
    rows = client.get(f"/reef/scenarios/{SCENARIO}/commits")["commits"]
    done = [
        row["detail"].get("metrics", {}) for row in rows if row["state"] == "settled" and not row["detail"].get("gate_only")
    ]
    cell.updates = sum(bool(metrics.get("policy_updated")) for metrics in done)
    cell.skipped = [str(metrics["skipped"]) for metrics in done if metrics.get("skipped")]
    cell.step_seconds = round(statistics.fmean([float(metrics["step_seconds"]) for metrics in done] or [0.0]), 2)


def answers(one: Played) -> int:
    """What the model wrote for a task: its proposal, where it was no drawn one, and all attempts."""
    attempts = len(one.trial.plain) + len(one.trial.hinted) if one.trial else 0
    return attempts + (one.receipt is not None)


def settle(client: Client) -> None:
    """Wait until no step runs and too few samples wait for one."""
    batch = int(yaml.safe_load(EXAMPLE.read_text())["reef"]["batch_size"])
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        row = next(row for row in client.get("/reef/status")["scenarios"] if row["name"] == SCENARIO)
        counts = row["counts"]
        if row["job"] is None and counts.get("queued", 0) < batch and not counts.get("reserved", 0):
            return
        time.sleep(0.3)
    raise SystemExit(f"no step within {PATIENCE_S:g} s: the cell is not kept")


FACTS = {"batch": ANSWERS, "draws": DRAWS, "held_out": len(Kept().held_out)}
CAMPAIGN = Campaign((__doc__ or "").splitlines()[0], RESULTS, 8, FACTS, ABOUT, PLAN, run)

if __name__ == "__main__":
    CAMPAIGN.main()
