"""Two scenarios with opposite preferences learn at once, each a LoRA adapter of its own on one base, trained by one trainer.

The users of `brief` want exactly one sentence, those of `talkative` want to be told more than that; both ask for capitals and
report scores, and SAO learns from them. A third scenario, `untouched`, is only asked. Measured on held-out questions, at
temperature 1 and greedily: how often each scenario's model does what its own users want, and what the others' want.

Whether one leaks into the other is asked twice. The untouched scenario must answer every held-out question token for token as
it did before the others learned. And each scenario learns once more with a server to itself from the same questions with the
same seeds: what it learned beside the other is compared with that, by content of every release and by score.

    python benchmarks/two_scenarios.py --seed 0      # runs are added to the results file, so they may be made one by one
    python benchmarks/two_scenarios.py --table
"""

import argparse
import json
import random
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.sao_cpu import interval, machine
from reef_cli.control.client import Client
from reef_cli.demo.server import Server
from reef_cli.evaluation.graders import OneSentence
from reef_cli.evaluation.suite import Item, Suite

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).parent / "results" / "two_scenarios.json"
BATCH, TOKENS, PATIENCE_S = 16, 24, 1200.0
BRIEF, TALKATIVE, UNTOUCHED = "brief", "talkative", "untouched"
_GOES_ON = re.compile(r"[.!?]\s+\S+(?:\s+\S+){2}")


def one_sentence(text: str) -> float:
    """What the users of `brief` want: exactly one finished sentence."""
    return OneSentence().grade(text).score


def goes_on(text: str) -> float:
    """What the users of `talkative` want: after the first sentence at least three words more."""
    return 1.0 if _GOES_ON.search(text) else 0.0


WANTED: Mapping[str, Callable[[str], float]] = {BRIEF: one_sentence, TALKATIVE: goes_on}


@dataclass
class Learned:
    """What became of a scenario: scores by preference, at temperature 1 and greedily, and the contents of its releases."""

    rewards: list[float] = field(default_factory=list)
    sampled: dict[str, float] = field(default_factory=dict)
    greedy: dict[str, float] = field(default_factory=dict)
    contents: list[str] = field(default_factory=list)


@dataclass
class Run:
    """One seed. `together` has both scenarios in one server, `alone` each in a server of its own (for some seeds)."""

    seed: int
    steps: int
    together: dict[str, Learned] = field(default_factory=dict)
    alone: dict[str, Learned] = field(default_factory=dict)
    untouched: Learned = field(default_factory=Learned)
    untouched_same: bool = False
    order: list[str] = field(default_factory=list)
    seconds: float = 0.0
    machine: Mapping[str, str] = field(default_factory=dict)


class Users:
    """The users of one scenario: they ask all questions of a step at once and report in the order they asked."""

    def __init__(self, scenario: str, server: Server, items: Sequence[Item], seed: int) -> None:
        self._scenario, self._server, self._items = scenario, server, list(items)
        self._random = random.Random(f"{seed} {scenario}")

    def step(self) -> float:
        """16 answers, scored and reported; their mean score."""
        items = self._random.sample(self._items, BATCH)
        seeds = [self._random.getrandbits(31) for _ in items]
        with ThreadPoolExecutor(8) as pool:
            told = list(pool.map(lambda item, number: ask(self._server, self._scenario, item, number, 1.0), items, seeds))
        scores = [WANTED[self._scenario](text) for text, _ in told]
        client = self._server.clone()
        for score, (_, receipt) in zip(scores, told, strict=True):
            report = {"score": score, "references": [receipt]}
            client.request("POST", "/reef/report", report, headers={"x-reef-scenario": self._scenario})
        client.close()
        return statistics.fmean(scores)


def ask(server: Server, scenario: str, item: Item, seed: int, temperature: float, *, keep: bool = True) -> tuple[str, str]:
    """An answer and its receipt, which is empty when nothing is to be recorded."""
    client = server.clone()
    messages = [dict(message) for message in item.messages]
    body = {"model": "default", "messages": messages, "max_tokens": TOKENS, "temperature": temperature, "seed": seed}
    headers = {"x-reef-scenario": scenario, **({} if keep else {"x-reef-capture": "off"})}
    answer = client.request("POST", "/v1/chat/completions", body, headers=headers)
    client.close()
    return answer.json["choices"][0]["message"]["content"] or "", answer.headers.get("x-reef-agent-record-id", "")


def answers(server: Server, scenario: str, items: Sequence[Item], temperature: float) -> list[str]:
    """One answer per held-out question, with the same seeds for everybody."""
    with ThreadPoolExecutor(8) as pool:
        return [text for text, _ in pool.map(lambda item: ask(server, scenario, item, 1000, temperature, keep=False), items)]


def measure(server: Server, client: Client, scenario: str, items: Sequence[Item], learned: Learned) -> list[str]:
    """Scores of the scenario's head by both preferences, and its releases; returns the greedy answers."""
    sampled, greedy = answers(server, scenario, items, 1.0), answers(server, scenario, items, 0.0)
    learned.sampled = {name: statistics.fmean(map(wanted, sampled)) for name, wanted in WANTED.items()}
    learned.greedy = {name: statistics.fmean(map(wanted, greedy)) for name, wanted in WANTED.items()}
    chain = client.get(f"/reef/scenarios/{scenario}/releases")["releases"]
    learned.contents = [row["content_id"] for row in reversed(chain)]
    return greedy


def steps_of(client: Client, scenario: str) -> list[Mapping[str, Any]]:
    """Learning steps of a scenario that have ended, newest first."""
    rows: list[Mapping[str, Any]] = client.get(f"/reef/scenarios/{scenario}/commits")["commits"]
    return [row for row in rows if not row["detail"].get("gate_only")]


def wait(client: Client, scenarios: Sequence[str], count: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while any(len(steps_of(client, scenario)) < count for scenario in scenarios):
        if time.monotonic() > deadline:
            raise SystemExit(f"no step within {PATIENCE_S:g} s: the run is not kept")
        time.sleep(0.3)


def configuration(seed: int, threads: int, model: str | None) -> str:
    """Without a suite the gate is open: what is measured is the run itself, good or bad."""
    reef = {
        "recipe": "recipes.sao.recipe:SAORecipe",
        "batch_size": BATCH,
        "critic_only_steps": 0,
        "policy_lr": 5e-4,
        "gate_every": 1000,
        "default_scenario": None,
    }
    engine = {"kind": "embedded", "threads": threads, "model": model or "smollm2-135m-instruct"}
    trainer = {"seed": seed, "threads": threads}
    return yaml.safe_dump({"reef": reef, "engine": engine, "trainer": trainer, "evaluation": {"smoke_items": 1}})


def serve(seed: int, scenarios: Sequence[str], run: Run, model: str | None) -> dict[str, Learned]:
    """One server from an empty home: the scenarios learn side by side. With both of them the untouched one is watched too."""
    suite = Suite.load(ROOT / "recipes/sao/examples/sao/suite.jsonl")
    items, held_out = suite.select("development").items, suite.select("heldout").items
    learned = {name: Learned() for name in scenarios}
    home = Path(tempfile.mkdtemp(prefix=f"reef-bench-two-{seed}-"))
    (home / "serve.yaml").write_text(configuration(seed, 2, model))
    server = Server(home, home / "serve.yaml", {})
    try:
        client = server.wait_ready(600.0, lambda _: None)
        watched = len(scenarios) > 1
        for name in (*scenarios, *([UNTOUCHED] if watched else [])):
            client.post("/reef/scenarios", {"name": name})
        before = measure(server, client, UNTOUCHED, held_out, run.untouched) if watched else []
        users = {name: Users(name, server, items, seed) for name in scenarios}
        for number in range(run.steps):
            for name in scenarios:
                learned[name].rewards.append(round(users[name].step(), 4))
            wait(client, scenarios, number + 1)
            print(f"  seed {seed} step {number + 1}:", {n: learned[n].rewards[-1] for n in scenarios}, flush=True)
        for name in scenarios:
            client.post(f"/reef/scenarios/{name}/pause")
            measure(server, client, name, held_out, learned[name])
        if watched:
            run.untouched_same = before == answers(server, UNTOUCHED, held_out, 0.0)
            rows = [row for name in scenarios for row in steps_of(client, name)]
            run.order = [row["scenario"] for row in sorted(rows, key=lambda row: float(row["created_at"]))]
    finally:
        server.stop()
        shutil.rmtree(home, ignore_errors=True)
    return learned


def one(seed: int, steps: int, *, alone: bool, model: str | None) -> Run:
    run = Run(seed, steps, machine=machine())
    started = time.monotonic()
    run.together = serve(seed, (BRIEF, TALKATIVE), run, model)
    for name in (BRIEF, TALKATIVE) if alone else ():
        run.alone |= serve(seed, (name,), run, model)
    run.seconds = round(time.monotonic() - started, 1)
    return run


# -- results ---------------------------------------------------------------------------------------------------------------


def table(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean over seeds with 95 % intervals: per scenario and preference, together, alone and untouched; and what leaked."""
    rows: dict[str, Any] = {}
    for how in ("sampled", "greedy"):
        for name in WANTED:
            rows[f"{UNTOUCHED}, {name}, {how}"] = spread([run["untouched"][how][name] for run in runs])
            for who in WANTED:
                rows[f"{who}, {name}, {how}"] = spread([run["together"][who][how][name] for run in runs])
                alone = [run["alone"][who][how][name] for run in runs if run["alone"]]
                if alone:
                    rows[f"{who} alone, {name}, {how}"] = spread(alone)
    pairs = [(run["together"][who], run["alone"][who]) for run in runs if run["alone"] for who in WANTED]
    # A gate of the quiet stream may release the content that is served once more.
    same = [list(dict.fromkeys(first["contents"])) == list(dict.fromkeys(second["contents"])) for first, second in pairs]
    gaps = [first["sampled"][name] - second["sampled"][name] for first, second in pairs for name in WANTED]
    rows["chains equal to those alone, bit for bit"] = f"{sum(same)} of {len(same)}"
    rows["largest difference to alone, sampled"] = round(max(map(abs, gaps)), 4) if gaps else None
    rows["untouched answers as before"] = f"{sum(bool(run['untouched_same']) for run in runs)} of {len(runs)}"
    return rows


def spread(values: Sequence[float]) -> dict[str, Any]:
    edges = [round(edge, 3) for edge in interval(list(values))] if len(values) > 1 else None
    return {"mean": round(statistics.fmean(values), 3), "interval": edges, "seeds": [round(value, 3) for value in values]}


def keep(path: Path, run: Run | None) -> list[dict[str, Any]]:
    """Add a run to the results file; all runs there are now, by seed."""
    runs = {row["seed"]: row for row in json.loads(path.read_text())["runs"]} if path.exists() else {}
    if run is not None:
        runs[run.seed] = asdict(run)
    found = [runs[seed] for seed in sorted(runs)]
    if found:
        path.parent.mkdir(exist_ok=True)
        payload = {"machine": machine(), "batch": BATCH, "table": table(found), "runs": found}
        path.write_text(json.dumps(payload, indent=1) + "\n")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=6, help="of each scenario, of 16 answers each")
    parser.add_argument("--alone", type=int, nargs="*", default=[0], help="seeds that also learn alone")
    parser.add_argument("--model")
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="show what is there and run nothing")
    args = parser.parse_args()
    for seed in [] if args.table else args.seed:
        keep(args.json, one(seed, args.steps, alone=seed in args.alone, model=args.model))
    for name, row in table(keep(args.json, None)).items():
        print(f"{name:50}", row if not isinstance(row, dict) else f"{row['mean']:.3f} {row['interval'] or ''}")


if __name__ == "__main__":
    main()
