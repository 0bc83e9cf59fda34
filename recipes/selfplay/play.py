"""Plays the game with a served model: generations of proposed tasks, attempts at each, reports of both. A client of the API.

A generation is proposed by a model that is shown the tasks with the highest regret so far. Each task is attempted without the
hint, which trains the solver, and with it, which only measures. Every task is in `<home>/selfplay/<scenario>/tasks.jsonl`, and
the game goes on where it stopped. The worked problem is `sums.py`.

    reef serve -c recipes/selfplay/examples/selfplay/serve.yaml
    python -m recipes.selfplay.play --generations 8
"""

import argparse
import json
import random
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.selfplay.regret import Trial
from recipes.selfplay.sums import Problem, Sums
from reef_cli.control.client import Client
from reef_cli.control.discovery import find_live, first_token
from reef_cli.core.errors import NotRunning, RecipeNotFound
from reef_cli.discovery.desk import Desk

SHOWN = 6
"""Tasks a proposer sees."""

HINTED = 2
"""Attempts with the hint, which measure and do not train."""

AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Played:
    """One task with its attempts; `receipt` is the proposal's."""

    task: str | None
    trial: Trial | None
    receipt: str | None = None


class Memory:
    """Tasks that were played, in a file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        self.rows: list[dict[str, Any]] = [json.loads(line) for line in lines if line.endswith("\n")]
        if len(self.rows) < len(lines):  # the last line of a game that was killed
            path.write_text("".join(lines[: len(self.rows)]), encoding="utf-8")

    @property
    def generation(self) -> int:
        """The next generation's number."""
        return 1 + max((row["generation"] for row in self.rows), default=-1)

    def best(self, out_of_reach: float, mastered: float) -> list[str]:
        """Frontier tasks by their latest trial, highest regret first."""
        latest = {row["task"]: row for row in self.rows if row["task"]}
        frontier = [row for row in latest.values() if out_of_reach <= row["solved"] <= mastered]
        return [row["task"] for row in sorted(frontier, key=lambda row: -row["regret"])]

    def add(self, generation: int, played: Sequence[Played]) -> None:
        for one in played:
            told = {"solved": one.trial.solved, "regret": one.trial.regret} if one.trial else {"solved": None, "regret": None}
            self.rows.append({"generation": generation, "task": one.task, **told})
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in self.rows[-len(played) :])


@dataclass(frozen=True, slots=True)
class Table:
    """How a game is played; sizes and bands are the recipe's settings."""

    proposals: int
    attempts: int
    hinted: int
    mastered: float
    out_of_reach: float
    random_tasks: bool = False
    seed: int = 0


class Game:
    """Generations on one scenario."""

    def __init__(self, connect: Callable[[], Client], scenario: str, problem: Problem, memory: Memory, table: Table) -> None:
        self._desk = Desk(connect, scenario)
        self._scenario, self._problem, self._memory, self._table = scenario, problem, memory, table
        self._report = connect()

    def generation(self) -> list[Played]:
        """One generation: proposals, attempts, reports."""
        number = self._memory.generation
        shown = [*self._memory.best(self._table.out_of_reach, self._table.mastered), *self._problem.starts][:SHOWN]
        dice = random.Random(f"{self._table.seed}/{number}")
        with ThreadPoolExecutor(AT_ONCE) as pool:
            drawn = list(pool.map(lambda seed: self._propose(shown, seed), _seeds(dice, self._table.proposals)))
            played = [self._attempt(pool, number, place, *one, dice) for place, one in enumerate(_distinct(drawn, shown))]
        if not self._table.random_tasks:
            for place, one in enumerate(played):
                self._tell(one.receipt, number, place, role="proposer", **_evidence(one))
        self._memory.add(number, played)
        return played

    def _propose(self, shown: Sequence[str], seed: int) -> tuple[str | None, str | None]:
        if self._table.random_tasks:
            return self._problem.dice(random.Random(seed)), None
        proposal = self._desk.propose(self._problem.propose(shown), seed)
        return self._problem.task(proposal.text), proposal.receipt

    def _attempt(
        self, pool: ThreadPoolExecutor, number: int, place: int, task: str | None, receipt: str | None, dice: random.Random
    ) -> Played:
        if task is None:
            return Played(None, None, receipt)
        asks = [(hinted, seed) for hinted, count in ((False, self._table.attempts), (True, self._table.hinted))
                for seed in _seeds(dice, count)]  # fmt: skip
        answers = list(pool.map(lambda ask: self._desk.propose(self._problem.solve(task, hinted=ask[0]), ask[1]), asks))
        scores = [self._problem.grade(task, answer.text) for answer in answers]
        for rollout in range(self._table.attempts):
            self._tell(answers[rollout].receipt, f"{number}/{place}", rollout, role="solver", score=scores[rollout])
        return Played(task, Trial(tuple(scores[: self._table.attempts]), tuple(scores[self._table.attempts :])), receipt)

    def _tell(self, receipt: str | None, group: int | str, rollout: int, *, score: float, **told: Any) -> None:
        body = {"score": score, "references": [receipt], "metadata": {"group": group, "rollout": rollout, **told}}
        self._report.request("POST", "/reef/report", body, headers={"x-reef-scenario": self._scenario})


def _seeds(dice: random.Random, count: int) -> list[int]:
    return [dice.getrandbits(31) for _ in range(count)]


def _distinct(drawn: Sequence[tuple[str | None, str | None]], shown: Sequence[str]) -> list[tuple[str | None, str | None]]:
    """The proposals; one that repeats a task it was shown, or one of its generation, is no task."""
    known, found = set(shown), []
    for task, receipt in drawn:
        found.append((None if task in known else task, receipt))
        known |= {task} if task else set()
    return found


def _evidence(one: Played) -> dict[str, Any]:
    if one.trial is None:
        return {"valid": False, "score": -1.0}
    trial = {"plain": list(one.trial.plain), "hinted": list(one.trial.hinted)}
    return {"valid": True, "task": one.task, "score": one.trial.regret, **trial}


def solved(desk: Desk, problem: Problem, tasks: Sequence[str], seed: int = 0) -> float:
    """Mean score of one attempt at each task."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = pool.map(lambda task: desk.propose(problem.solve(task, hinted=False), seed).text, tasks)
        return statistics.fmean(problem.grade(task, text) for task, text in zip(tasks, answers, strict=True))


def opened(
    connect: Callable[[], Client],
    scenario: str,
    memory: Path,
    *,
    random_tasks: bool = False,
    seed: int = 0,
    problem: Problem | None = None,
) -> Game:
    """A game on a scenario of a server with this recipe; its settings are the table's. Raises `RecipeNotFound`.

    Sums are played where no problem is given.
    """
    desk = Desk(connect, scenario)
    desk.open()
    settings = desk.settings()
    if "proposals" not in settings:
        raise RecipeNotFound(
            "The server does not serve self-play.", hint="reef serve with recipes.selfplay.recipe:SelfPlayRecipe"
        )
    sizes = int(settings["proposals"]), int(settings["group_size"]), HINTED
    table = Table(*sizes, float(settings["mastered"]), float(settings["out_of_reach"]), random_tasks, seed)
    return Game(connect, scenario, problem or Sums(), Memory(memory), table)


def connector(home: Path) -> Callable[[], Client]:
    """Makes clients of the server that runs in `home`. Raises `NotRunning`."""
    running = find_live(home / "run" / "serve.json")
    if running is None:
        raise NotRunning(f"No server runs in {home}.", hint="reef serve -c recipes/selfplay/examples/selfplay/serve.yaml")
    token = first_token(Path(running.token_file).read_text(encoding="utf-8")) if running.token_file else None
    return lambda: Client(running.url, token, timeout_s=600.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--home", type=Path, default=Path(".reef"), help="home of the running server")
    parser.add_argument("--scenario", default="selfplay")
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--random-tasks", action="store_true", help="tasks are drawn, not proposed; only the solver learns")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    memory = args.home / "selfplay" / args.scenario / "tasks.jsonl"
    game = opened(connector(args.home), args.scenario, memory, random_tasks=args.random_tasks, seed=args.seed)
    for _ in range(args.generations):
        played = game.generation()
        tried = [one.trial for one in played if one.trial]
        print(
            f"{len(tried)} of {len(played)} proposals are tasks; solved {_mean([t.solved for t in tried])},"
            f" regret {_mean([t.regret for t in tried])}: {', '.join(one.task for one in played if one.task)}",
            flush=True,
        )


def _mean(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.2f}" if values else "-"


if __name__ == "__main__":
    main()
