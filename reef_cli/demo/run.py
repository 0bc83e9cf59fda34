"""The demo from start to table: measure, learn, measure, roll back, measure."""

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from reef_cli.control.client import Client
from reef_cli.demo.scenes import Scene, example_folder, scene
from reef_cli.demo.server import Server
from reef_cli.demo.show import Show, table
from reef_cli.demo.user import Style, User
from reef_cli.evaluation.suite import Suite

__all__ = ["SCENARIO", "Options", "Result", "example_folder", "judge", "learn", "play", "run"]

SCENARIO = "demo"
THREADS, BACKLOG = 8, 32


class Options(Protocol):
    """What a person may choose; None leaves it to the demo."""

    @property
    def recipe(self) -> str: ...
    @property
    def json(self) -> bool: ...
    @property
    def steps(self) -> int | None: ...
    @property
    def model(self) -> str | None: ...
    @property
    def home(self) -> Path | None: ...
    @property
    def keep(self) -> bool: ...
    @property
    def seed(self) -> int | None: ...


@dataclass(frozen=True)
class Measured:
    """A held-out score, the release that gave it, and its answers by item (greedy)."""

    score: float
    interval: tuple[float, float]
    release_id: str
    answers: Mapping[str, str]
    tokens: Mapping[str, str]


@dataclass(frozen=True)
class Result:
    """What `--json` prints. `samples` has one question with its answer before, after and after the rollback."""

    before: float
    after: float
    rolled_back: float
    release_before: str
    release_after: str
    steps: int
    seconds: float
    samples: Mapping[str, str]
    release_rolled_back: str = ""
    same_tokens_after_rollback: bool = False
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    rewards: list[float] = field(default_factory=list)
    asked: int = 0
    gate: str = ""


def run(options: Options) -> int:
    """Show the demo; 0 when the model got better and the rollback restored its earlier answers."""
    chosen = scene(options.recipe)
    show = Show(quiet=options.json, curve=chosen.curve, share=chosen.share)
    home = options.home or Path(tempfile.mkdtemp(prefix="reef-demo-"))
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        result = play(home, show, chosen, steps=options.steps, model=options.model, seed=options.seed or 0)
    finally:
        show.close()
        if options.home is None and not options.keep:
            shutil.rmtree(home, ignore_errors=True)
    if options.json:
        print(json.dumps(asdict(result)))
    else:
        table(result, chosen)
        if options.home or options.keep:
            print(f"The home is kept: reef serve --reef.home {home}", file=sys.stderr)
    return 0 if result.after > result.before and result.same_tokens_after_rollback else 1


def play(
    home: Path,
    show: Show,
    scene: Scene,
    *,
    steps: int | None = None,
    model: str | None = None,
    seed: int = 0,
    overrides: Mapping[str, str] | None = None,
) -> Result:
    """Run the whole story once in `home`. `overrides` are further settings of the server."""
    started = time.monotonic()
    flags = {**({"engine.model": model} if model else {}), **(overrides or {})}
    show.phase("starting the server, the engine and the model")
    server = Server(home, scene.folder / "demo.yaml", flags)
    try:
        client = server.wait_ready(300.0, show.phase)
        client.post("/reef/scenarios", {"name": SCENARIO})
        before = _measure(client, show, "before learning")
        items = Suite.load(scene.folder / "suite.jsonl").select("development").items
        style = Style(THREADS, scene.max_tokens, scene.temperature, BACKLOG, scene.says)
        user = User(SCENARIO, items, style, server.clone, seed)
        done, rewards = learn(client, user, show, steps or scene.steps)
        gate = judge(client, show)
        after = _measure(client, show, "after learning")
        show.phase(f"rolling back to {before.release_id}")
        client.post(f"/reef/scenarios/{SCENARIO}/rollback", {"release_id": before.release_id})
        back = _measure(client, show, "after the rollback")
    finally:
        server.stop()
    shares = [round(scene.share(reward), 4) for reward in rewards]
    result = _result(before, after, back, done, shares, user.asked, time.monotonic() - started)
    return replace(result, gate=gate)


def learn(client: Client, user: User, show: Show, steps: int) -> tuple[int, list[float]]:
    """Let the user talk until enough batches were learned from; the steps taken, and the mean reward of each."""
    batch = int(client.get(f"/reef/scenarios/{SCENARIO}/contract")["settings"]["batch_size"])
    user.start()
    try:
        while True:
            state = _scenario(client)
            user.waiting = int(state["counts"]["queued"])
            done = int(state["counts"]["consumed"]) // batch
            show.learning(done, steps, state, user.recent)
            if user.fault is not None:
                raise user.fault
            if done >= steps:
                break
            time.sleep(0.5)
    finally:
        user.stop()
    client.post(f"/reef/scenarios/{SCENARIO}/pause")
    return done, [float(value) for value in settled(client, show).get("rewards", [])]


def judge(client: Client, show: Show) -> str:
    """The run's last full gate, against the last gated release; its verdict in words."""
    show.phase("the full gate judges the run")
    job = client.post(f"/reef/scenarios/{SCENARIO}/jobs", {"kind": "gate"})["job_id"]
    settled(client, show)
    ended = client.get(f"/reef/scenarios/{SCENARIO}/jobs/{job}")
    return f"{ended['outcome'] or ended['state']}: {ended['reason']}"


def settled(client: Client, show: Show) -> dict[str, Any]:
    """Wait until no job runs; the scenario's state then."""
    while (state := _scenario(client))["job"] is not None:
        show.phase(f"finishing a job: {state['phase']}")
        time.sleep(0.5)
    return state


def _scenario(client: Client) -> dict[str, Any]:
    rows: list[dict[str, Any]] = client.get("/reef/status")["scenarios"]
    return next(row for row in rows if row["name"] == SCENARIO)


def _measure(client: Client, show: Show, when: str) -> Measured:
    show.phase(f"measuring held-out answers {when}")
    head = _scenario(client)["head"]
    report = client.post(f"/reef/scenarios/{SCENARIO}/evaluate", {"release_id": head}, timeout_s=600.0)
    answers = {row["item"]: row["text"] for row in report["rows"]}
    tokens = {row["item"]: row["tokens"] for row in report["rows"]}
    low, high = report["interval"]
    measured = Measured(float(report["score"]), (float(low), float(high)), str(report["release_id"]), answers, tokens)
    show.measured(when, measured.score, measured.release_id)
    return measured


def _result(
    before: Measured, after: Measured, back: Measured, steps: int, rewards: list[float], asked: int, seconds: float
) -> Result:
    changed = [item for item in before.answers if before.answers[item] != after.answers.get(item)]
    item = changed[0] if changed else next(iter(before.answers))
    samples = {"item": item, "before": before.answers[item], "after": after.answers[item], "rolled_back": back.answers[item]}
    return Result(
        before=before.score,
        after=after.score,
        rolled_back=back.score,
        release_before=before.release_id,
        release_after=after.release_id,
        release_rolled_back=back.release_id,
        steps=steps,
        seconds=round(seconds, 1),
        samples=samples,
        same_tokens_after_rollback=all(before.tokens.values()) and before.tokens == back.tokens,
        intervals={"before": before.interval, "after": after.interval, "rolled_back": back.interval},
        rewards=rewards,
        asked=asked,
    )
