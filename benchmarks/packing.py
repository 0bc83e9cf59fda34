"""Circle packing with equal numbers of verified tries: does learning while searching find better packings?

Arms, each with `--steps` x 2 x 8 tries, one verifier call and one line a try:
    tttd          PUCT over the archive, SmolLM2-135M writes the lines and is trained after every step (recipes/tttd)
    puct          the same without training
    best_of_n     the same model, untrained, always from the first solutions (rows only)
    guidance_ttt  PUCT, SmolLM2-135M is trained to advise, the same model as it was before learning writes the lines
    guide         the same without training; without any guide, too, it is `puct`
    random        PUCT, but lines are drawn at random instead of written by a model, and never wrong
    restarts      random rows, noise, SciPy's SLSQP with analytic Jacobians; no archive, no model

In the space of lines (the default) the solver follows a line once: what is written matters. In that of walks it follows it 16
times, and search hardly needs a model. Every arm keeps its archive (and server home) in `--work` and goes on there; `--minutes`
ends a sitting after a whole step.

    python benchmarks/packing.py --n 26 32 --arms tttd puct best_of_n random restarts --seeds 0 1 2 --steps 12
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.sao_cpu import interval, machine
from reef_cli.demo.server import Server
from reef_cli.discovery.archive import Archive, Rollout
from reef_cli.discovery.desk import Desk, Proposal, Standing
from reef_cli.discovery.guidance import GuidanceSpace
from reef_cli.discovery.packing.circles import PackingProblem
from reef_cli.discovery.packing.geometry import best_radii, slsqp
from reef_cli.discovery.packing.lines import LineSpace
from reef_cli.discovery.problem import Ask, Space
from reef_cli.discovery.run import Plan, Run

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = {name: ROOT / f"recipes/{name}/examples/{name}/serve.yaml" for name in ("tttd", "guidance_ttt")}
SERVED = {"tttd": "tttd", "puct": "tttd", "best_of_n": "tttd", "guidance_ttt": "guidance_ttt", "guide": "guidance_ttt"}
"""The example whose server the arm's model runs on."""

GROUPS, ROLLOUTS = 2, 8
EXPLORATION = 1.0
ARMS = ("restarts", "random", "best_of_n", "puct", "tttd", "guide", "guidance_ttt")
SCENARIO = "packing"
BEST_KNOWN = {26: 2.635983084917608, 32: 2.939572771205}


@dataclass
class Arm:
    """One arm of one size with one seed, as the results file has it."""

    arm: str
    n: int
    seed: int
    space: str = "lines"
    steps: int = 0
    tries: int = 0
    valid: int = 0
    best_strict: float = 0.0
    best_value: float = 0.0
    best_after: dict[int, float] = field(default_factory=dict)
    tries_to_best_known: int | None = None
    valid_share_first_last: tuple[float, float] = (0.0, 0.0)
    seconds: float = 0.0
    machine: Mapping[str, str] = field(default_factory=machine)


class Dice:
    """Lines at random, in the grammar of the model's: uniform over the kinds of change and their numbers."""

    def __init__(self, n: int) -> None:
        self._n = n

    def propose(self, ask: Ask, seed: int) -> Proposal:
        dice = random.Random(seed)
        return Proposal(self._rows(dice) if ask.prompt.endswith("ROWS") else self._shake(dice), None)

    def _rows(self, dice: random.Random) -> str:
        middle = round(self._n**0.5)
        while True:
            counts = [dice.randint(middle - 2, middle + 2) for _ in range(dice.randint(middle - 1, middle + 1))]
            if abs(sum(counts) - self._n) <= 2:
                return " " + " ".join(map(str, counts))

    def _shake(self, dice: random.Random) -> str:
        strength = dice.randint(0, 9)
        kind = dice.choice(("all", "area", "move", "swap"))
        one, other = dice.sample(range(1, self._n + 1), 2)
        extra = {"all": "", "area": f" AREA {dice.randint(1, 9)}", "move": f" MOVE {one}", "swap": f" SWAP {one} {other}"}
        return f" {strength}{extra[kind]}"

    def standing(self) -> Standing:
        raise NotImplementedError

    def same_weights(self, left: str | None, right: str | None) -> bool:
        raise NotImplementedError

    def report(self, rollout: Rollout, run: str, *, learn: bool) -> str | None:
        raise NotImplementedError

    def await_trained(self, *_: Any) -> Standing:
        raise NotImplementedError


def search(arm: Arm, folder: Path, args: argparse.Namespace, enough: Callable[[], bool], note: Callable[[], None]) -> bool:
    """Run the arm up to `args.steps` steps, or until `enough`; whether it is done."""
    problem = PackingProblem(arm.n)
    archive = Archive(folder / "archive.db")
    server: Server | None = None
    try:
        _read(arm, archive)
        if arm.steps >= args.steps:
            return True
        served: Any = Dice(arm.n)
        if arm.arm in SERVED:
            settings = {"trainer.seed": str(arm.seed), **({"engine.model": args.model} if args.model else {})}
            settings |= dict(pair.split("=", 1) for pair in args.set)
            server = Server(_home(folder), EXAMPLES[SERVED[arm.arm]], settings)
            server.wait_ready(600.0, lambda _: None)
            served = Desk(server.clone, SCENARIO)
            served.open()
        plan = Plan(
            f"{arm.arm}-{arm.n}-{arm.seed}", GROUPS, ROLLOUTS, learn=arm.arm in EXAMPLES,
            initial_only=arm.arm in ("best_of_n", "restarts"), c=args.exploration, seed=arm.seed,
            concurrency=16 if server else 2,
        )  # fmt: skip
        run = Run(problem, _space(arm, problem, server), served, archive, plan)
        run.begin(adopt_head=True)
        while arm.steps < args.steps:
            started = time.monotonic()
            run.step()
            seconds = time.monotonic() - started
            _time(folder, seconds)
            _read(arm, archive)
            note()
            print(f"{arm.arm} n={arm.n} seed={arm.seed} step {arm.steps}: {arm.best_strict:.9f}  {seconds:.0f} s", flush=True)
            if enough():
                break
        return arm.steps >= args.steps
    finally:
        archive.close()
        if server is not None:
            server.stop()


def _space(arm: Arm, problem: PackingProblem, server: Server | None) -> Space:
    """The arm's own form of its space."""
    if arm.arm == "restarts":
        return LineSpace(arm.n, lambda centres: slsqp(best_radii(centres)))
    space = problem.space(arm.space)
    if server is None or SERVED[arm.arm] != "guidance_ttt":
        return space
    releases = server.clone().get(f"/reef/scenarios/{SCENARIO}/releases")["releases"]
    first = min(releases, key=lambda row: int(row["step"]))
    executor = Desk(server.clone, SCENARIO, pin=str(first["release_id"]))
    return GuidanceSpace(space, lambda ask, seed: executor.propose(ask, seed).text, problem.statement.partition("\n")[0])


def _home(folder: Path) -> Path:
    home = folder / "home"
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    return home


def _time(folder: Path, seconds: float) -> None:
    with (folder / "seconds").open("a") as file:
        file.write(f"{seconds:.1f}\n")


def _read(arm: Arm, archive: Archive) -> None:
    """The arm's figures from its archive."""
    rows = [row for row in archive.history() if row["committed"]]
    arm.steps, arm.tries, arm.valid = len(rows), sum(r["rollouts"] for r in rows), sum(r["valid"] for r in rows)
    arm.best_after = {row["step"] * GROUPS * ROLLOUTS: row["best"] for row in rows}
    if rows:
        arm.best_strict = rows[-1]["best"]
        third = max(1, len(rows) // 3)
        shares = [row["valid"] / row["rollouts"] for row in rows]
        arm.valid_share_first_last = (sum(shares[:third]) / third, sum(shares[-third:]) / third)
        best = archive.best()
        arm.best_value = best.value if best else 0.0
    at = archive.path.parent / "seconds"
    arm.seconds = round(sum(map(float, at.read_text().split())), 1) if at.exists() else 0.0
    arm.tries_to_best_known = None
    count = 0
    for row in rows:
        for rollout in archive.rollouts(row["step"]):
            count += 1
            if arm.tries_to_best_known is None and rollout.valid and rollout.score > BEST_KNOWN.get(arm.n, 9e9) - 1e-6:
                arm.tries_to_best_known = count


def save(path: Path, arms: list[Arm]) -> None:
    """The results so far, beside those of other arms in the file. An arm without a new step stays as it is."""
    kept = json.loads(path.read_text())["arms"] if path.exists() else []
    found = {(row["space"], row["arm"], row["n"], row["seed"]): row for row in kept}
    for arm in arms:
        place = (arm.space, arm.arm, arm.n, arm.seed)
        if arm.steps and (place not in found or found[place]["steps"] != arm.steps):
            found[place] = vars(arm)
    rows = list(found.values())
    rows.sort(key=lambda row: (row["space"], row["n"], ARMS.index(row["arm"]), row["seed"]))
    payload = {
        "table": table(rows),
        "tries_per_step": GROUPS * ROLLOUTS,
        "best_known": BEST_KNOWN,
        "arms": rows,
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(payload, indent=1) + "\n")


def table(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Per space and size the arms at equal tries (as many as every run has): best sums by seed, mean, 95 % interval."""
    found = []
    for space, n in sorted({(row["space"], row["n"]) for row in rows}):
        here = [row for row in rows if (row["space"], row["n"]) == (space, n)]
        equal = min(row["tries"] for row in here)
        told = {}
        for name in (name for name in ARMS if any(row["arm"] == name for row in here)):
            mine = [row for row in here if row["arm"] == name]
            sums = [float({int(tries): best for tries, best in row["best_after"].items()}[equal]) for row in mine]
            told[name] = {
                "best": sums,
                "mean": statistics.fmean(sums),
                "interval": interval(sums) if len(sums) > 1 else None,
                "known": [row["tries_to_best_known"] for row in mine],
                "valid": sum(row["valid"] for row in mine) / sum(row["tries"] for row in mine),
                "minutes": round(statistics.fmean(row["seconds"] / row["tries"] * equal for row in mine) / 60, 1),
            }
        found.append({"space": space, "n": n, "tries": equal, "arms": told})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--n", type=int, nargs="+", default=[26, 32])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--space", default="lines", choices=("walks", "lines"))
    parser.add_argument("--exploration", type=float, default=EXPLORATION)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--model")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings of the servers, for trials")
    parser.add_argument("--work", type=Path, default=Path.home() / ".cache" / "reef" / "benchmarks" / "packing")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "packing.json")
    args = parser.parse_args()
    deadline = time.monotonic() + args.minutes * 60
    arms = [Arm(name, n, seed, args.space) for seed in args.seeds for n in args.n for name in args.arms]
    for arm in arms:
        if time.monotonic() > deadline:
            break
        folder = args.work / f"{arm.space}-{arm.arm}-{arm.n}-{arm.seed}"
        search(arm, folder, args, lambda: time.monotonic() > deadline, lambda: save(args.json, arms))
        save(args.json, arms)
    for arm in arms:
        print(f"{arm.n:3} {arm.arm:10} seed {arm.seed} {arm.tries:5} tries  strict {arm.best_strict:.9f}  {arm.seconds:.0f} s")


if __name__ == "__main__":
    main()
