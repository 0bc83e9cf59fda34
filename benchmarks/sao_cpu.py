"""SAO on two CPU cores, end to end: serve, record, report, train, gate, release, for three arms at the same budget.

Arms: `sao` (the recipe as shipped), `plain` (no critic, no mask: rewards as advantages, plain importance weights) and `frozen`
(no learning). Each learning arm consumes the same number of scored answers; every run goes through the whole product, started
by `reef demo`'s own code. Measured on held-out questions at T = 1 (several answers per question, graded by the suite's
graders) and greedily, against the release the run ended with.

    python benchmarks/sao_cpu.py --seeds 3 --steps 12
"""

import argparse
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from reef_cli.control.client import Client
from reef_cli.demo.run import SCENARIO, example_folder, judge, learn
from reef_cli.demo.server import Server
from reef_cli.demo.show import Show
from reef_cli.demo.user import Style, User
from reef_cli.evaluation.suite import Item, Suite

ARMS = {
    "sao": {},
    "plain": {"reef.use_critic": "false", "reef.use_mask": "false", "reef.critic_only_steps": "0"},
    "frozen": None,
}
DRAWS = 4


@dataclass
class Run:
    """One arm with one seed."""

    arm: str
    seed: int
    sampled: float = 0.0
    greedy: float = 0.0
    rewards: list[float] = field(default_factory=list)
    gate: str = ""
    releases: int = 0
    seconds: float = 0.0


def score(client: Client, server: Server, items: list[Item], temperature: float, draws: int) -> float:
    """Mean grade of the head's answers, outside the record."""
    jobs = [(item, draw) for item in items for draw in range(draws)]

    def one(job: tuple[Item, int]) -> float:
        item, draw = job
        mine = server.clone()
        body = {
            "model": "default",
            "messages": [dict(message) for message in item.messages],
            "max_tokens": 32,
            "temperature": temperature,
            "seed": 1000 + draw,
        }
        headers = {"x-reef-scenario": SCENARIO, "x-reef-capture": "off"}
        answer = mine.request("POST", "/v1/chat/completions", body, headers=headers)
        mine.close()
        return item.grader.grade(answer.json["choices"][0]["message"]["content"] or "").score

    with ThreadPoolExecutor(8) as pool:
        grades = list(pool.map(one, jobs))
    return statistics.fmean(grades)


def run(arm: str, seed: int, steps: int, model: str | None, show: Show) -> Run:
    folder = example_folder()
    suite = Suite.load(folder / "suite.jsonl")
    home = Path(tempfile.mkdtemp(prefix=f"reef-bench-{arm}-{seed}-"))
    flags = {"trainer.seed": str(seed), **(ARMS[arm] or {}), **({"engine.model": model} if model else {})}
    started = time.monotonic()
    server = Server(home, folder / "demo.yaml", flags)
    outcome = Run(arm, seed)
    try:
        client = server.wait_ready(600.0, show.phase)
        client.post("/reef/scenarios", {"name": SCENARIO})
        if ARMS[arm] is not None:
            user = User(SCENARIO, suite.select("development").items, Style(8, 24, 1.0, 32), server.clone, seed)
            _, outcome.rewards = learn(client, user, show, steps)
            outcome.gate = judge(client, show)
        held_out = list(suite.select("heldout").items)
        outcome.sampled = score(client, server, held_out, 1.0, DRAWS)
        outcome.greedy = score(client, server, held_out, 0.0, 1)
        outcome.releases = len(client.get(f"/reef/scenarios/{SCENARIO}/releases")["releases"])
    finally:
        server.stop()
        shutil.rmtree(home, ignore_errors=True)
    outcome.seconds = round(time.monotonic() - started, 1)
    return outcome


def interval(values: list[float]) -> tuple[float, float]:
    """Mean plus and minus the 95 % half width of Student's t."""
    if len(values) < 2:
        return values[0], values[0]
    t = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}.get(len(values), 2.0)
    half = t * statistics.stdev(values) / math.sqrt(len(values))
    mean = statistics.fmean(values)
    return mean - half, mean + half


def machine() -> dict[str, str]:
    root = Path(__file__).resolve().parent.parent
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True, check=False)
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), ""
    )
    return {
        "cpu": cpu,
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
        "commit": commit.stdout.strip(),
        "load": " ".join(f"{value:.1f}" for value in os.getloadavg()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--model")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "sao_cpu.json")
    args = parser.parse_args()
    show = Show()
    runs: list[Run] = []
    for seed in range(args.seeds):
        for arm in args.arms:
            if arm == "frozen" and seed:  # greedy and seeded answers of a frozen model do not depend on the seed
                runs.append(Run(**{**asdict(next(r for r in runs if r.arm == "frozen")), "seed": seed}))
                continue
            runs.append(run(arm, seed, args.steps, args.model, show))
            print(asdict(runs[-1]), flush=True)
    show.close()
    table = {}
    for arm in args.arms:
        sampled = [one.sampled for one in runs if one.arm == arm]
        greedy = [one.greedy for one in runs if one.arm == arm]
        table[arm] = {
            "sampled_mean": statistics.fmean(sampled),
            "sampled_interval": interval(sampled),
            "greedy_mean": statistics.fmean(greedy),
            "greedy_interval": interval(greedy),
        }
        row = table[arm]
        print(
            f"{arm:8} T=1 {row['sampled_mean']:.3f} [{row['sampled_interval'][0]:.3f}, {row['sampled_interval'][1]:.3f}]",
            end="   ",
        )
        print(f"greedy {row['greedy_mean']:.3f} [{row['greedy_interval'][0]:.3f}, {row['greedy_interval'][1]:.3f}]")
    args.json.parent.mkdir(exist_ok=True)
    payload = {"machine": machine(), "steps": args.steps, "draws": DRAWS, "table": table, "runs": [asdict(one) for one in runs]}
    args.json.write_text(json.dumps(payload, indent=1) + "\n")


if __name__ == "__main__":
    main()
