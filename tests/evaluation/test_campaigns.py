"""What benchmarks of learning compare: equal budgets, held-out tasks that nobody trains on, tables that hide no arm."""

import json
import random
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cells import Campaign, stored
from benchmarks.packing import Arm, save, table
from benchmarks.selfplay_cpu import Kept, answers
from recipes.selfplay.play import Played
from recipes.selfplay.regret import Trial


def packed(arm: str, seed: int, best: list[float], known: int | None = None) -> dict[str, Any]:
    after = {str(16 * (step + 1)): value for step, value in enumerate(best)}
    tries = 16 * len(best)
    row = asdict(Arm(arm, 26, seed, "lines", len(best), tries, tries // 2, best[-1], best[-1], {}, known, machine={}))
    return {**row, "best_after": after, "seconds": 60.0 * len(best)}


def test_packing_compares_arms_at_the_tries_all_of_them_have() -> None:
    rows = [packed("tttd", 0, [2.5, 2.6, 2.63], 40), packed("tttd", 1, [2.4, 2.5]), packed("puct", 0, [2.55, 2.56])]
    (found,) = table(rows)
    assert (found["tries"], list(found["arms"])) == (32, ["puct", "tttd"])
    learned = found["arms"]["tttd"]
    assert learned["best"] == [2.6, 2.5] and learned["mean"] == pytest.approx(2.55) and learned["known"] == [40, None]
    assert learned["interval"][0] < 2.5 < 2.6 < learned["interval"][1] and learned["minutes"] == 2.0
    assert found["arms"]["puct"]["interval"] is None and learned["valid"] == 0.5


def test_spaces_and_sizes_are_never_compared_with_each_other() -> None:
    rows = [packed("tttd", 0, [2.5]), {**packed("tttd", 0, [2.9]), "n": 32}, {**packed("random", 0, [2.6]), "space": "walks"}]
    assert [(one["space"], one["n"], list(one["arms"])) for one in table(rows)] == [
        ("lines", 26, ["tttd"]), ("lines", 32, ["tttd"]), ("walks", 26, ["random"]),
    ]  # fmt: skip


def test_a_finished_arm_keeps_the_machine_and_commit_it_ran_on(tmp_path: Path) -> None:
    file = tmp_path / "packing.json"
    arm = Arm("tttd", 26, 0, steps=1, tries=16, best_after={16: 2.5}, machine={"commit": "old"})
    save(file, [arm])
    save(file, [replace(arm, machine={"commit": "new"}), Arm("puct", 26, 0)])
    assert [(row["arm"], row["machine"]["commit"]) for row in json.loads(file.read_text())["arms"]] == [("tttd", "old")]
    save(file, [replace(arm, steps=2, tries=32, best_after={16: 2.5, 32: 2.6}, machine={"commit": "new"})])
    (row,) = json.loads(file.read_text())["arms"]
    assert (row["tries"], row["machine"]["commit"]) == (32, "new")


def test_held_out_sums_are_nobodys_task() -> None:
    problem = Kept()
    assert len(problem.held_out) > 90 and problem.held_out == Kept().held_out
    assert all(problem.task(f" {task}") is None for task in problem.held_out)
    drawn = {problem.dice(random.Random(seed)) for seed in range(3000)}
    assert not drawn & set(problem.held_out) and all(problem.task(task) == task for task in drawn)


def test_every_text_of_the_model_counts_against_the_budget() -> None:
    trial = Trial((1.0, 0.0, 0.0, 0.0), (1.0, 1.0))
    assert answers(Played("3 + 4", trial, "receipt")) == 7  # proposed
    assert answers(Played("3 + 4", trial)) == 6  # drawn
    assert answers(Played(None, None, "receipt")) == 1  # no task


@dataclass
class Made:
    arm: str
    seed: int
    sampled: float
    greedy: float = 0.5
    seconds: float = 60.0
    step_seconds: float = 1.0
    machine: str = "some"


def test_cells_are_kept_and_run_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, ran = tmp_path / "results.json", []

    def run(arm: str, seed: int, steps: int, model: str | None) -> Made:
        ran.append(f"{arm}/{seed}")
        return Made(arm, seed, 0.5 + seed / 10)

    about = dict.fromkeys(("own", "less", "other", "frozen"), "")
    campaign = Campaign("some", file, 6, {"batch": 16}, about, {"own": ("own", "less", "other")}, run)
    monkeypatch.setattr("sys.argv", ["benchmark", "--seeds", "2", "--cells", "own/0", "own/1", "frozen/0"])
    campaign.main()
    monkeypatch.setattr("sys.argv", ["benchmark", "--seeds", "2"])
    campaign.main()
    assert ran == ["own/0", "own/1", "frozen/0", "less/0", "other/0", "less/1", "other/1"]
    rows = campaign.table(stored(file))["own"]
    assert list(rows) == ["recipe", "ablation", "control", "frozen"] and rows["frozen"]["seeds"] == 1
    assert rows["recipe"]["sampled_by_seed"] == {"0": 0.5, "1": 0.6} and rows["frozen"]["sampled_interval"] is None
