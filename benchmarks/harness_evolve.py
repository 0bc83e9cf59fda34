"""Harness evolution on two CPU cores, end to end: install, use, report, propose, judge by episodes, release or undo.

Reef's own agent on SmolLM2-135M answers questions; its user wants numbered lists and says so after each answer. What was said
often enough becomes a rule, and the gate decides over episodes on held-out questions. Then another user wants one word only,
which would ruin the lists: the gate must reject that rule. At the end every held-out question is answered under the harness at
the start and under the one in force. One run per seed; runs are added to the results file, so they may be made one by one.

    python benchmarks/harness_evolve.py --seed 0
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.sao_cpu import machine
from reef_cli.control.client import Client
from reef_cli.demo.server import Server
from reef_cli.evaluation.suite import Suite
from reef_cli.harness import discovery, install
from reef_cli.harness.tree import Tree

EXAMPLE = Path(__file__).resolve().parent.parent / "recipes/harness_evolve/examples/harness_evolve"
SCENARIO = "default"
GOOD, BAD = "Answer with a numbered list.", "Answer with one word only."
START = [
    {
        "id": "settings",
        "kind": "config",
        "config": {"value": {"rules_place": "user", "tools": [], "sampling": {"temperature": 0.8, "max_tokens": 40}}},
    },
    {"id": "assistant", "kind": "system", "config": {"text": "You are a helpful assistant.", "mode": "replace"}},
]
"""The harness before the run: no tools, 40 tokens, rules behind the user's words, where a small model heeds them."""


@dataclass
class Run:
    """One seed."""

    seed: int
    good: dict[str, Any] = field(default_factory=dict)
    bad: dict[str, Any] = field(default_factory=dict)
    before: float = 0.0
    after: float = 0.0
    difference: dict[str, Any] = field(default_factory=dict)
    releases: int = 0
    episodes: int = 0
    seconds: float = 0.0


class User:
    """Works with an agent that was installed through the server, and reports every run."""

    def __init__(self, client: Client, token: str, folder: Path) -> None:
        self.folder = folder
        self.environment = {"HOME": str(folder), "PATH": os.environ["PATH"], "REEF_TOKEN": token}
        manifest = client.request("GET", "/reef/harness", headers={"x-reef-scenario": SCENARIO}).json
        names = ("release_id", "content_id", "step", "changed", "needs_nothing")
        facts = install.ReleaseFacts(SCENARIO, *(manifest[name] for name in names))
        target = install.Target(client.url, str(manifest["model"]))
        packed = install.payload(discovery.adapter("native"), Tree.of(manifest["entries"]), facts, target)
        install.local_install(packed, self.environment)

    def wrapper(self, *words: str) -> str:
        command = [str(self.folder / ".local/bin/reef-native"), *words]
        done = subprocess.run(command, env=self.environment, cwd=self.folder, capture_output=True, text=True, check=True)
        return done.stdout

    def complain(self, questions: list[str], feedback: str) -> None:
        """Ask all questions at once, each in a session of its own, and say the same of every answer."""
        with ThreadPoolExecutor(len(questions)) as pool:
            list(pool.map(lambda question: self.wrapper("-p", question), questions))
        self.wrapper("report", "--score", "0", "--feedback", feedback)


def ended(client: Client, count: int) -> dict[str, Any]:
    """The newest job once `count` of them have ended."""
    while True:
        rows = client.get(f"/reef/scenarios/{SCENARIO}/jobs")["jobs"]
        if len(rows) >= count and all(row["state"] in ("settled", "failed") for row in rows):
            return dict(rows[0])
        time.sleep(0.5)


def told(job: dict[str, Any]) -> dict[str, Any]:
    """What a job concluded, for the results file."""
    evidence = job["detail"].get("verdict", {}).get("evidence", {})
    names = ("pairs", "wins", "losses", "ties", "candidate_mean", "current_mean", "interval", "stopped_early")
    facts = {name: evidence.get(name) for name in names}
    return {"outcome": job["outcome"], "reason": job["reason"], "changed": job["detail"]["metrics"].get("changed"), **facts}


def run(seed: int, items: int) -> Run:
    home, mine = (Path(tempfile.mkdtemp(prefix=f"reef-bench-evolve-{name}-")) for name in ("server", "user"))
    started = time.monotonic()
    outcome = Run(seed)
    server = Server(home, EXAMPLE / "tryout.yaml", {"engine.threads": "1", "evaluation.limit": str(items)})
    try:
        client = server.wait_ready(600.0, lambda _: None)
        first = client.request(
            "POST",
            "/reef/harness/proposals",
            {"mutations": [{"op": "create", "entry": entry} for entry in START], "judged": False},
            headers={"x-reef-scenario": SCENARIO},
        ).json["release_id"]
        user = User(client, (home / "token").read_text().strip(), mine)
        suite = Suite.load(EXAMPLE / "questions.jsonl").select("development")
        questions = [str(item.messages[0]["content"]) for item in suite.items]
        random.Random(seed).shuffle(questions)
        user.complain(questions[:4], GOOD)
        outcome.good = told(ended(client, 1))
        print("good", outcome.good, flush=True)
        user.wrapper("update")
        user.complain(questions[4:8], BAD)
        outcome.bad = told(ended(client, 2))
        print("bad", outcome.bad, flush=True)
        head = next(row for row in client.get(f"/reef/scenarios/{SCENARIO}/releases")["releases"] if row["current"])
        body = {"releases": [first, head["release_id"]], "limit": items}
        report = client.request("POST", f"/reef/scenarios/{SCENARIO}/evaluate", body).json
        means = {row["release"]: row["mean"] for row in report["releases"]}
        outcome.before, outcome.after = means[first], means[head["release_id"]]
        outcome.difference = report["differences"][0] if report["differences"] else {}
        outcome.releases = len(client.get(f"/reef/scenarios/{SCENARIO}/releases")["releases"])
        outcome.episodes = len(list((home / "episodes" / "kept").iterdir()))
    finally:
        server.stop()
        shutil.rmtree(home, ignore_errors=True)
        shutil.rmtree(mine, ignore_errors=True)
    outcome.seconds = round(time.monotonic() - started, 1)
    return outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--items", type=int, default=24, help="held-out questions")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "harness_evolve.json")
    args = parser.parse_args()
    known = json.loads(args.json.read_text())["runs"] if args.json.exists() else []
    for seed in args.seed:
        made = asdict(run(seed, args.items)) | {"machine": machine()}
        print(json.dumps(made), flush=True)
        known = sorted([*(one for one in known if one["seed"] != seed), made], key=lambda one: one["seed"])
        table = {name: statistics.fmean(one[name] for one in known) for name in ("before", "after")}
        args.json.parent.mkdir(exist_ok=True)
        args.json.write_text(
            json.dumps({"items": args.items, "good": GOOD, "bad": BAD, "mean": table, "runs": known}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
