"""Tables of what was measured: what is not shown is not claimed, whatever the means say."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

from docs_pages import demo, packing, recipes
from docs_pages.compare import AHEAD, BEHIND, LEVEL, UNKNOWN, Measured, sentence, verdict

OWN = Measured("own", 0.8, (0.7, 0.9))


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (Measured("x", 0.5, (0.4, 0.6)), AHEAD),
        (Measured("x", 0.5, (0.3, 0.7)), LEVEL),
        (Measured("x", 0.95, (0.91, 0.99)), BEHIND),
        (Measured("x", 0.1, None), UNKNOWN),
        (Measured("x", 0.1, None, fixed=True), AHEAD),
        (Measured("x", 0.75, None, fixed=True), LEVEL),
        (Measured("x", 0.95, None, fixed=True), BEHIND),
    ],
)
def test_ahead_is_only_who_shares_no_part_of_the_interval(other: Measured, expected: str) -> None:
    assert verdict(OWN, other) == expected


def test_one_run_is_compared_with_nothing() -> None:
    assert verdict(Measured("own", 0.8, None), Measured("x", 0.1, (0.0, 0.2))) == UNKNOWN


def test_a_sentence_names_everyone_once() -> None:
    others = [Measured("a", 0.5, (0.4, 0.6)), Measured("b", 0.7, (0.6, 0.8)), Measured("c", 0.7, (0.6, 0.8))]
    told = sentence(OWN, others)
    assert told == (
        "`own` is ahead of `a`: the 95 % intervals do not overlap; **not ahead of `b`, `c`**: the 95 % intervals overlap."
    )


def cell_row(arm: str, values: list[float], interval: list[float] | None) -> dict[str, Any]:
    by_seed = {str(seed): value for seed, value in enumerate(values)}
    mean = sum(values) / len(values)
    return {"arm": arm, "about": "", "seeds": len(values), "sampled": mean, "sampled_by_seed": by_seed,
            "sampled_interval": interval, "greedy": mean, "minutes": 1.0}  # fmt: skip


def test_a_recipe_that_does_not_beat_its_control_says_so(tmp_path: Path) -> None:
    rows = {
        "recipe": cell_row("sdpo", [0.5, 0.6, 0.7], [0.35, 0.85]),
        "ablation": {"arm": "sdpo-pure", "about": "", "seeds": 0},
        "control": cell_row("grpo", [0.6, 0.7, 0.8], [0.45, 0.95]),
        "frozen": cell_row("frozen", [0.3], None),
    }
    machine = {"cores": "2", "cpu": "some", "commit": "abc"}
    result = {
        "machine": machine,
        "steps": 6,
        "batch": 16,
        "table": {"sdpo": rows},
        "cells": {"sdpo/0": {"arm": "sdpo", "machine": machine}},
    }
    file = tmp_path / "recipes_cpu.json"
    file.write_text(json.dumps(result))
    text = recipes.table(file, "sdpo")
    assert "**not ahead of `grpo`**" in text and "ahead of `frozen`" in text and "Not run: `sdpo-pure`." in text


def test_what_has_not_run_says_so(tmp_path: Path) -> None:
    for text in (
        recipes.table(tmp_path / "none.json", "sdpo"),
        packing.table(tmp_path / "none.json", "tttd"),
        demo.table(tmp_path / "none.json", "openclawrl"),
    ):
        assert text.startswith("Not run")


def arm(best: list[float], interval: list[float] | None) -> dict[str, Any]:
    return {
        "best": best,
        "mean": sum(best) / len(best),
        "interval": interval,
        "known": [None] * len(best),
        "valid": 0.5,
        "minutes": 1.0,
    }


def test_packing_compares_the_learning_arm_at_equal_tries(tmp_path: Path) -> None:
    arms = {"tttd": arm([2.63, 2.634], [2.62, 2.64]), "puct": arm([2.62, 2.626], [2.61, 2.63]), "guide": arm([2.6], None)}
    machine = {"cores": "2", "cpu": "some", "commit": "abc"}
    result = {
        "table": [{"space": "lines", "n": 26, "tries": 96, "arms": arms}],
        "best_known": {"26": 2.635983},
        "arms": [{"arm": name, "machine": machine} for name in arms],
    }
    file = tmp_path / "packing.json"
    file.write_text(json.dumps(result))
    text = packing.table(file, "tttd")
    assert "96 tries for 26" in text and "**not ahead of `puct`**" in text and "not run: `best_of_n`" in text
    assert "`guide`" not in text and "not compared" not in text
    assert "`guide`" in packing.table(file, "guidance_ttt")


def test_a_demo_counts_the_runs_that_became_better(tmp_path: Path) -> None:
    machine = {"cores": "2", "cpu": "some", "commit": "abc"}
    run = {"recipe": "openclawrl", "seed": 0, "before": 0.2, "after": 0.8, "rolled_back": 0.2, "steps": 9, "seconds": 300.0,
           "same_tokens_after_rollback": True, "intervals": {"after": [0.6, 0.9]}, "rewards": [0.1, 0.7],
           "machine": machine}  # fmt: skip
    file = tmp_path / "demo.json"
    file.write_text(json.dumps({"runs": [run, {**run, "seed": 1, "intervals": {"after": [0.1, 0.4]}}]}))
    text = demo.table(file, "openclawrl")
    assert "**Better than before in 1 of 2 runs" in text and "0.60 to 0.90" in text and "the same tokens" in text
