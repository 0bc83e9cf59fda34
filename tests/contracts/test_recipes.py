"""What every shipped recipe keeps to, so that a deployment can rely on any of them; a recipe of one's own passes the same."""

import importlib
import inspect
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reef_cli.config.recipes import resolve_recipe
from reef_cli.core.ids import RecordId
from reef_cli.core.types import Sample
from reef_cli.learning import conformance
from reef_cli.learning.contract import RecipeSettings, Refusal
from reef_cli.learning.samples import WeightsRecipe

ROOT = Path(__file__).parent.parent.parent / "recipes"
PATHS = sorted(
    f"recipes.{folder.name}.recipe:{name}"
    for folder in ROOT.iterdir()
    if (folder / "recipe.py").is_file()
    for name, thing in vars(importlib.import_module(f"recipes.{folder.name}.recipe")).items()
    if inspect.isclass(thing) and name.endswith("Recipe") and thing.__module__ == f"recipes.{folder.name}.recipe"
)


def test_there_are_recipes() -> None:
    assert len(PATHS) >= 6


@pytest.mark.parametrize("name", conformance.CHECKS)
@pytest.mark.parametrize("path", PATHS)
def test_it_keeps_to_the_contract(path: str, name: str) -> None:
    assert list(conformance.CHECKS[name](path, resolve_recipe(path))) == []


class Sloppy(WeightsRecipe):
    name = "slop py"
    settings_type = RecipeSettings
    program_path = "recipes.sao.program:SAOProgram"
    for_program = ("batch_size",)
    asked = 0

    def admit(self, report: Any, records: Any, step_of: Any) -> Any:
        Sloppy.asked += 1
        return Refusal(f"no: {Sloppy.asked}") if records[0].complete else replace(SAMPLE, id=report.id)

    def assemble(self, samples: Any, tools: Any) -> Any:
        return []


class Crowded(Sloppy):
    def members(self) -> Any:
        return [Sloppy(self.settings), Crowded(self.settings)]


SAMPLE = Sample(RecordId("s"), (), conformance.TRACE, 0.0, (), 0, 0.0)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("says what it is", "no identifier"), ("says what it is", "signal is no Signal"),
        ("admission is pure and names its reasons", "different things"),
        ("admission is pure and names its reasons", "no stable name"),
        ("unsound records never train weights", "incomplete makes a sample"),
        ("the tensor half exists and takes its settings", "Unknown settings"),
        ("README and examples stand", "README.md is missing"),
    ],
)  # fmt: skip
def test_the_checks_can_fail(name: str, words: str) -> None:
    assert any(words in fault for fault in conformance.CHECKS[name]("tests.contracts.test_recipes:Sloppy", Sloppy))


def test_members_of_one_surface_or_in_members_are_found() -> None:
    found = list(conformance.CHECKS["members of a composite keep apart"]("", Crowded))
    assert [words.partition("slop py ")[2] for words in found] == [
        "is a composite itself",
        "changes the weights, as another does",
    ]


def test_a_scaffolded_recipe_passes_unchanged(tmp_path: Path) -> None:
    def reef(*words: str) -> Any:
        command = [sys.executable, "-m", "reef_cli", "recipe", *words, "--json"]
        env = {**os.environ, "PYTHONPATH": str(ROOT.parent)}
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=env)
        return done.returncode, json.loads(done.stdout) if done.stdout else None

    code, made = reef("new", "first_try")
    assert code == 0 and made["files"] == [
        "recipes/first_try/README.md", "recipes/first_try/examples/first_try/serve.yaml", "recipes/first_try/program.py",
        "recipes/first_try/recipe.py",
    ]  # fmt: skip
    code, found = reef("check", "first_try")
    assert code == 0 and found["faults"] == 0 and len(found["checks"]) == len(conformance.CHECKS)
    assert reef("new", "first_try")[0] != 0 and reef("new", "Not-A-Name")[0] != 0
    (tmp_path / "recipes/first_try/README.md").unlink()
    code, found = reef("check", "first_try")
    assert code == 1 and [one["fault"] for one in found["checks"] if one["fault"]] == ["first_try/README.md is missing"]
