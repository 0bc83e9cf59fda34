"""The weight recipes on two CPU cores, end to end and at the same budget: serve, record, report, train, release, measure.

One task for all of them: capitals in exactly one finished sentence (the suite of `recipes/sao`; training and held-out items
share no country). Every learning arm gets the same number of answers from the policy, 16 per step; what it is told about them
is its own signal: a score, its group, a demonstration, a hint for the teacher, or what a person says next. Arms per recipe:
itself, ablations that take its idea away, a control that makes something simpler of the same answers, and the frozen model.
Several recipes share a control, so a run is done once: cells are `arm/seed`, each starts a server of its own, and those that
have ended are kept in the results file, so they may be made one by one. Measured on held-out questions at temperature 1 and
greedily.

    python benchmarks/recipes_cpu.py --seeds 3 --minutes 120        # all cells that fit
    python benchmarks/recipes_cpu.py --cells opd/0 frozen/0         # some
    python benchmarks/recipes_cpu.py --table                        # what is there
"""

import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.cells import Campaign
from benchmarks.sao_cpu import machine, score
from reef_cli.control.client import Client
from reef_cli.demo.run import SCENARIO, example_folder
from reef_cli.demo.server import Server
from reef_cli.evaluation.grade import grade_now
from reef_cli.evaluation.graders import OneSentence
from reef_cli.evaluation.suite import Item, Suite

RESULTS = Path(__file__).parent / "results" / "recipes_cpu.json"
BATCH, GROUP, DRAWS = 16, 4, 2
POLICY_LR = 5e-4
"""Of every arm: more than the default, since the steps are few."""

STEP_S, SHORT_S = 1200.0, 20.0
"""Patience with a step that must come, and with a queue that may be too short for one."""

HINT = "Answer in one short sentence."
PLAIN = "{question}\n\nAnswer with this sentence: {demonstration}"
THANKS, WRONG, CHANGE = "Thanks, that is right.", "No, that is not right.", f"Please {HINT[0].lower()}{HINT[1:]}"
"""What a person says after an answer who reports nothing."""

GRPO, SFT = "recipes.grpo.recipe:GRPORecipe", "recipes.sft.recipe:SFTRecipe"
OPD, SDFT = "recipes.opd.recipe:OPDRecipe", "recipes.sdft.recipe:SDFTRecipe"
SDPO, SAO = "recipes.sdpo.recipe:SDPORecipe", "recipes.sao.recipe:SAORecipe"
OPENCLAWRL = "recipes.openclawrl.recipe:OpenClawRLRecipe"


@dataclass(frozen=True)
class Arm:
    """What a cell serves with, and what its reports say."""

    recipe: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    grouped: bool = False
    demonstration: str = ""
    """Name of the metadata entry that carries the right answer, empty for none."""
    talks: bool = False
    """Whether the person answers in the same conversation in place of reporting."""


ARMS: Mapping[str, Arm | None] = {
    "sao": Arm(SAO, {"critic_only_steps": 0}),
    "grpo": Arm(GRPO, {"group_size": GROUP}, grouped=True),
    "grpo-plain": Arm(GRPO, {"group_size": GROUP, "advantage": "dr_grpo", "off_policy": {"kind": "none"}}, grouped=True),
    "sft": Arm(SFT, {}, demonstration="demonstration"),
    "sft-own": Arm(SFT, {"imitate_above": 0.0}),
    "sft-good": Arm(SFT, {"imitate_above": 1.0, "batch_size": 8}),
    "opd": Arm(OPD, {"teacher_hint": HINT}),
    "opd-top-k": Arm(OPD, {"teacher_hint": HINT, "loss": "top_k"}),
    "opd-no-hint": Arm(OPD, {}),
    "opd-continual": Arm(OPD, {"continual": "answers", "success": 1.0}, demonstration="teacher_answer"),
    "sdft": Arm(SDFT, {"top_k": 50}, demonstration="teacher_context"),
    "sdft-plain-context": Arm(SDFT, {"top_k": 50, "context": PLAIN}, demonstration="teacher_context"),
    "sdft-all-tokens": Arm(SDFT, {"top_k": 50, "skip_tokens": 0}, demonstration="teacher_context"),
    "sdpo": Arm(SDPO, {"group_size": GROUP, "top_k": 50, "hybrid": 0.9, "success": 1.0}, grouped=True),
    "sdpo-pure": Arm(SDPO, {"group_size": GROUP, "top_k": 50, "success": 1.0}, grouped=True),
    "openclawrl": Arm(OPENCLAWRL, {}, talks=True),
    "openclawrl-votes": Arm(OPENCLAWRL, {"hint_weight": 0.0}, talks=True),
    "openclawrl-hints": Arm(OPENCLAWRL, {"reward_weight": 0.0}, talks=True),
    "openclawrl-baseline": Arm(OPENCLAWRL, {"vote_baseline": True}, talks=True),
    "frozen": None,
}
ABOUT: Mapping[str, str] = {
    "sao": "a critic as baseline, one answer per question",
    "grpo": "answers compared in groups of 4",
    "grpo-plain": "no division by the deviation, no mask",
    "sft": "imitates the right answers",
    "sft-own": "imitates its own answers, good and bad",
    "sft-good": "imitates its own good answers",
    "opd": "the base that reads a hint scores its tokens",
    "opd-top-k": "the same over the 50 likeliest tokens",
    "opd-no-hint": "the base without a hint",
    "opd-continual": "imitates right answers where its own failed",
    "sdft": "the copy that reads the right answer scores its tokens",
    "sdft-plain-context": "its context is the right answer and no more words",
    "sdft-all-tokens": "the first three tokens count too",
    "sdpo": "group advantages 0.9, teacher with a sibling's answer 0.1",
    "sdpo-pure": "the teacher alone",
    "openclawrl": "votes and hints of what people say next",
    "openclawrl-votes": "votes alone",
    "openclawrl-hints": "hints alone",
    "openclawrl-baseline": "votes minus their mean, and hints",
    "frozen": "no learning",
}
"""What an arm is, in the tables."""

PLAN: Mapping[str, tuple[str, ...]] = {
    "grpo": ("grpo", "grpo-plain", "sft-good"),
    "sft": ("sft", "sft-own", "grpo"),
    "opd": ("opd", "opd-no-hint", "grpo"),
    "opd (top-K)": ("opd-top-k", "opd-no-hint", "grpo"),
    "opd (continual)": ("opd-continual", "sft-own", "sft"),
    "sdft": ("sdft", "sdft-plain-context", "sdft-all-tokens", "sft"),
    "sdpo": ("sdpo", "sdpo-pure", "grpo"),
    "sao": ("sao", "grpo-plain", "grpo"),
    "openclawrl": ("openclawrl", "openclawrl-baseline", "openclawrl-votes", "openclawrl-hints", "grpo"),
}
"""Per recipe: itself, its ablations, its control; `frozen` is every recipe's last arm."""


@dataclass
class Cell:
    """One arm with one seed."""

    arm: str
    seed: int
    steps: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    sampled: float = 0.0
    greedy: float = 0.0
    rewards: list[float] = field(default_factory=list)
    updates: int = 0
    skipped: list[str] = field(default_factory=list)
    trained_answers: int = 0
    teacher_gap: list[float] = field(default_factory=list)
    step_seconds: float = 0.0
    seconds: float = 0.0
    machine: Mapping[str, str] = field(default_factory=dict)


class Talker:
    """Asks, scores, and reports as an arm needs it; a step's answers are all there before the step is taken."""

    def __init__(self, arm: Arm, server: Server, items: Sequence[Item], seed: int) -> None:
        self._arm, self._server, self._items = arm, server, list(items)
        self._random = random.Random(seed)
        self.told = 0

    def step(self, number: int) -> float:
        """16 answers, reported; their mean reward."""
        tasks = self._random.sample(self._items, BATCH // GROUP if self._arm.grouped else BATCH)
        places = [(item, f"{number}.{i}", k) for i, item in enumerate(tasks) for k in range(GROUP if self._arm.grouped else 1)]
        seeds = [self._random.getrandbits(31) for _ in places]
        with ThreadPoolExecutor(8) as pool:
            return statistics.fmean(pool.map(self._exchange, places, seeds))

    def _exchange(self, place: tuple[Item, str, int], seed: int) -> float:
        item, group, rollout = place
        client = self._server.clone()
        body = {
            "model": "default",
            "messages": [dict(message) for message in item.messages],
            "max_tokens": 24,
            "temperature": 1.0,
            "seed": seed,
        }
        headers = {"x-reef-scenario": SCENARIO, "x-reef-tag-session": f"{group}.{rollout}"}
        answer = client.request("POST", "/v1/chat/completions", body, headers=headers)
        text = answer.json["choices"][0]["message"]["content"] or ""
        grade = grade_now(item.grader, text).score
        if self._arm.talks:
            said = [{"role": "assistant", "content": text}, {"role": "user", "content": reply(item.grader, text)}]
            body = {**body, "messages": [*item.messages, *said], "max_tokens": 1}
            client.request("POST", "/v1/chat/completions", body, headers=headers)
            client.close()
            return grade
        metadata: dict[str, Any] = {"group": group, "rollout": rollout} if self._arm.grouped else {}
        if self._arm.demonstration:
            metadata[self._arm.demonstration] = right_answer(item)
        report = {"score": grade, "references": [answer.headers["x-reef-agent-record-id"]], "metadata": metadata}
        client.request("POST", "/reef/report", report, headers=headers)
        client.close()
        return grade


def reply(grader: Any, text: str) -> str:
    """What a person says to an answer: thanks, that its form is to be another, or that it is wrong."""
    if grade_now(grader, text).score == 1.0:
        return THANKS
    form = next(part for part in grader.graders if isinstance(part, OneSentence))
    return WRONG if grade_now(form, text).score == 1.0 else CHANGE


def right_answer(item: Item) -> str:
    """`capital-sri-lanka-what` and its grader's city as a sentence."""
    country = " ".join(word.capitalize() for word in item.id.split("-")[1:-1])
    return f"The capital of {country} is {city_of(item.grader)}."


def city_of(grader: Any) -> str:
    """The text the item's grader looks for."""
    value = getattr(grader, "value", None)
    if isinstance(value, str):
        return value
    found = [city_of(part) for part in getattr(grader, "graders", ())]
    return next((text for text in found if text), "")


def settled(client: Client, before: int, *, must: bool) -> Mapping[str, Any]:
    """Wait for the next step to end; the scenario's state then. A short queue ends the wait, unless a step `must` come."""
    deadline = time.monotonic() + (STEP_S if must else SHORT_S)
    while True:
        state = next(row for row in client.get("/reef/status")["scenarios"] if row["name"] == SCENARIO)
        late = time.monotonic() > deadline
        if state["job"] is None and (len(jobs(client)) > before or (late and not must)):
            return dict(state)
        if late and must:
            raise SystemExit(f"no step within {STEP_S:g} s: the cell is not kept")
        time.sleep(0.5)


def jobs(client: Client) -> list[Mapping[str, Any]]:
    """The learning steps that have ended, newest first; gates of a stream that looked quiet are left out."""
    rows: list[Mapping[str, Any]] = client.get(f"/reef/scenarios/{SCENARIO}/commits")["commits"]
    return [row for row in rows if not row["detail"].get("gate_only")]


def configuration(arm: Arm, seed: int, model: str | None) -> str:
    """The cell's serve.yaml. Without a suite the gate is open: what is measured is the run itself, good or bad."""
    reef = {
        "recipe": arm.recipe,
        "batch_size": BATCH,
        "max_staleness": 4,
        "gate_every": 1000,
        "policy_lr": POLICY_LR,
        **arm.settings,
    }
    engine = {"kind": "embedded", **({"model": model} if model else {})}
    return yaml.safe_dump({"reef": reef, "engine": engine, "trainer": {"seed": seed}, "evaluation": {"smoke_items": 1}})


def run(name: str, seed: int, steps: int, model: str | None) -> Cell:
    """One cell from an empty home to its held-out scores."""
    suite = Suite.load(example_folder() / "suite.jsonl")
    arm = ARMS[name]
    cell = Cell(name, seed, steps, dict(arm.settings) if arm else {}, machine=machine())
    home = Path(tempfile.mkdtemp(prefix=f"reef-bench-{name}-{seed}-"))
    (home / "serve.yaml").write_text(configuration(arm or Arm(SAO), seed, model))
    started = time.monotonic()
    server = Server(home, home / "serve.yaml", {})
    try:
        client = server.wait_ready(600.0, lambda _: None)
        client.post("/reef/scenarios", {"name": SCENARIO})
        if arm is not None:
            learn(cell, arm, client, server, suite.select("development").items, steps)
        client.post(f"/reef/scenarios/{SCENARIO}/pause")
        held_out = list(suite.select("heldout").items)
        cell.sampled = score(client, server, held_out, 1.0, DRAWS)
        cell.greedy = score(client, server, held_out, 0.0, 1)
    finally:
        server.stop()
        shutil.rmtree(home, ignore_errors=True)
    cell.seconds = round(time.monotonic() - started, 1)
    return cell


def learn(cell: Cell, arm: Arm, client: Client, server: Server, items: Sequence[Item], steps: int) -> None:
    talker = Talker(arm, server, items, cell.seed)
    batch = int(arm.settings.get("batch_size", BATCH))
    for number in range(steps):
        before = len(jobs(client))
        cell.rewards.append(round(talker.step(number), 4))
        # Arms that train on some answers only may have to wait for more of them.
        state = settled(client, before, must=batch == BATCH)
        print(f"  {cell.arm}/{cell.seed} step {number + 1}: reward {cell.rewards[-1]:.2f}, head {state['head']}", flush=True)
    done = [job["detail"].get("metrics", {}) for job in reversed(jobs(client)) if job["state"] == "settled"]
    cell.updates = sum(bool(metrics.get("policy_updated")) for metrics in done)
    cell.skipped = [str(metrics["skipped"]) for metrics in done if metrics.get("skipped")]
    cell.trained_answers = sum(int(metrics.get("samples", 0)) for metrics in done)
    cell.teacher_gap = [round(float(metrics["teacher_gap"]), 4) for metrics in done if "teacher_gap" in metrics]
    cell.step_seconds = round(statistics.fmean([float(metrics["step_seconds"]) for metrics in done] or [0.0]), 2)


CAMPAIGN = Campaign((__doc__ or "").splitlines()[0], RESULTS, 6, {"batch": BATCH, "draws": DRAWS}, ABOUT, PLAN, run)

if __name__ == "__main__":
    CAMPAIGN.main()
