"""Every example that a recipe ships: its settings make a recipe, a trainer's program and an engine's command; and it serves.

That the files load for the embedded engine and for SGLang is part of the contract suite (`reef recipe check`).
"""

from dataclasses import replace
from pathlib import Path

import pytest

from reef_cli.config.load import Loaded, load
from reef_cli.core.types import Surface
from reef_cli.engines import launch
from reef_cli.trainer.learner import Learner
from reef_cli.trainer.process import join_alone
from tests.doubles.upstream import Upstream
from tests.e2e.conftest import double
from tests.e2e.server import serving
from tests.trainer.conftest import TOY, toy_model

__all__ = ["double", "toy_model"]  # the fixtures, borrowed
ROOT = Path(__file__).resolve().parents[2] / "recipes"
EXAMPLES = sorted(ROOT.glob("*/examples/**/*.yaml"))


def name(path: Path) -> str:
    return f"{path.relative_to(ROOT).parts[0]}-{path.stem}"


def is_weights(found: Loaded) -> bool:
    return found.recipe is not None and found.recipe.surface is Surface.WEIGHTS


def test_every_recipe_has_an_example() -> None:
    recipes = {file.parent.name for file in ROOT.glob("*/recipe.py")}
    assert {path.relative_to(ROOT).parts[0] for path in EXAMPLES} == recipes and len(EXAMPLES) >= len(recipes)


@pytest.mark.parametrize("path", EXAMPLES, ids=name)
def test_its_settings_make_a_program_on_a_model(path: Path, toy_model: Path) -> None:
    found = load([], {}, path)
    recipe = found.make_recipe()
    spec = recipe.program()
    if not is_weights(found):
        assert spec.path.partition(":")[0]
        return
    join_alone(threads=1)
    learner = Learner(toy_model, spec.path, spec.settings, replace(TOY, precision="fp32"))
    assert learner.program.optimizer.lr > 0


@pytest.mark.parametrize("path", [path for path in EXAMPLES if "harness_evolve" not in path.parts], ids=name)
def test_sglang_would_be_started_with_it(path: Path, tmp_path: Path) -> None:
    engine = load(["--engine.kind", "sglang"], {}, path).settings.engine
    started = launch.sglang(engine, tmp_path, 1234, tmp_path / "log", tmp_path / "private.json")
    words = started.command
    assert words[words.index("--model-path") + 1] == str(tmp_path) and "--enable-lora" in words
    for flag, value in engine.sglang.items():
        assert f"--{flag.replace('_', '-')}" in words, f"{flag}: {value} got lost"


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=name)
def test_it_serves(path: Path, tiny_model: Path, double: Upstream, tmp_path: Path) -> None:
    """A real `reef serve` with the file; only model, provider and threads are this machine's."""
    found = load([], {}, path)
    upstream = {"engine.url": double.url, "engine.model": "stub-model"}
    local = {"engine.kind": "embedded", "trainer.rank": str(found.settings.trainer.rank)}
    settings = upstream if found.settings.engine.kind == "upstream" else local
    with serving(tmp_path / "h", tiny_model, config=path, **settings) as server:
        assert server.client().post("/reef/scenarios", json={"name": "one"}).status_code in (200, 201)
        contract = server.get("/reef/scenarios/one/contract")
        assert found.recipe is not None and contract["recipe"] == found.recipe.name
        assert server.ask("hello").status_code == 200
