"""What every shipped recipe keeps to, so that a deployment can rely on any of them; a recipe of one's own passes the same."""

import dataclasses
import importlib
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from reef_cli.config.load import load
from reef_cli.config.recipes import resolve_recipe
from reef_cli.core.ids import RecordId, new_id
from reef_cli.core.types import Cadence, Inference, Report, Sample, Surface, TokenSpan, TokenTrace
from reef_cli.learning.contract import Acquisition, ProgramSpec, RecipeSettings, Refusal, Signal, Target

ROOT = Path(__file__).parent.parent.parent / "recipes"
PATHS = sorted(
    f"recipes.{folder.name}.recipe:{name}"
    for folder in ROOT.iterdir()
    if (folder / "recipe.py").is_file()
    for name, thing in vars(importlib.import_module(f"recipes.{folder.name}.recipe")).items()
    if inspect.isclass(thing) and name.endswith("Recipe") and thing.__module__ == f"recipes.{folder.name}.recipe"
)


def made(path: str) -> Any:
    recipe = resolve_recipe(path)
    return recipe(recipe.settings_type())


def record(**changes: Any) -> Inference:
    trace = TokenTrace((1, 2), (3, 4), (-0.5, -0.25), (1, 1), (TokenSpan("s@r1-00000000", 0, 2),))
    facts: dict[str, Any] = {
        "id": RecordId(new_id()),
        "scenario": "s",
        "created_at": 1.0,
        "dialect": "chat",
        "model": "m",
        "request": b"{}",
        "messages": [{"role": "user", "content": "x"}],
        "response": {"role": "assistant", "content": "y"},
        "tokens": trace,
    }
    return Inference(**{**facts, **changes})


def report(records: list[Inference], **changes: Any) -> Report:
    return Report(RecordId(new_id()), "s", 2.0, tuple(one.id for one in records), **changes)


STEPS = {"s@r1-00000000": 1}


def test_there_are_recipes() -> None:
    assert PATHS


@pytest.mark.parametrize("path", PATHS)
class TestRecipe:
    def test_says_what_it_is(self, path: str) -> None:
        recipe = resolve_recipe(path)
        assert recipe.name.isidentifier() and recipe.title and recipe.__doc__
        assert recipe.surface in set(Surface) and recipe.cadence in set(Cadence)
        assert isinstance(recipe.signal, Signal) and recipe.signal.form and recipe.signal.source
        assert isinstance(recipe.acquisition, Acquisition) and isinstance(recipe.target, Target)

    def test_settings_are_documented_and_frozen(self, path: str) -> None:
        settings = resolve_recipe(path).settings_type
        assert issubclass(settings, RecipeSettings) and settings.__dataclass_params__.frozen  # type: ignore[attr-defined]
        source = inspect.getsource(sys.modules[settings.__module__])
        for field in dataclasses.fields(settings):
            if field.name in {inherited.name for inherited in dataclasses.fields(RecipeSettings)}:
                continue
            after = source.partition(f"    {field.name}: ")[2].partition("\n")[2].lstrip()
            assert after.startswith('"""'), f"{field.name} has no docstring"

    def test_the_server_half_is_light(self, path: str) -> None:
        module = path.partition(":")[0]
        code = (
            f"import sys, {module}; print([n for n in ('torch', 'transformers', 'deepspeed', 'aiohttp') if n in sys.modules])"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT.parent)
        assert done.stdout.strip() == "[]"

    def test_admission_is_pure_and_named(self, path: str) -> None:
        recipe, one = made(path), record()
        scored = report([one], score=1.0)
        first, second = recipe.admit(scored, [one], STEPS), recipe.admit(scored, [one], STEPS)
        assert first == second
        for fate in (first, recipe.admit(report([one], feedback="hm"), [one], STEPS)):
            assert isinstance(fate, Sample | Refusal)
            if isinstance(fate, Refusal):
                assert fate.reason.replace("_", "").isalnum()

    def test_a_sample_names_its_records_and_the_oldest_weights(self, path: str) -> None:
        one = record()
        fate = made(path).admit(report([one], score=0.5), [one], STEPS)
        if isinstance(fate, Sample):
            assert fate.records == (one.id,) and fate.step == 1 and fate.producing == ("s@r1-00000000",)

    @pytest.mark.parametrize(
        "changes",
        [
            {"tokens": None},
            {"complete": False},
            {"tokens": TokenTrace((1,), (), (), (), ())},
            {"tokens": TokenTrace((1,), (2,), (0.5,), (1,), (TokenSpan("s@r1-00000000", 0, 1),))},
            {"tokens": TokenTrace((1,), (2,), (-0.5,), (1,), ())},
            {"tokens": TokenTrace((1,), (2,), (-0.5,), (1,), (TokenSpan("other@r1-00000000", 0, 1),))},
        ],
        ids=["no tokens", "incomplete", "empty", "positive log-prob", "span gap", "foreign weights"],
    )
    def test_unsound_records_never_train_weights(self, path: str, changes: dict[str, Any]) -> None:
        recipe = made(path)
        if recipe.surface is Surface.WEIGHTS:
            one = record(**changes)
            assert isinstance(recipe.admit(report([one], score=1.0), [one], STEPS), Refusal)

    def test_the_tensor_half_exists(self, path: str) -> None:
        recipe = made(path)
        if recipe.surface is Surface.WEIGHTS:
            spec = recipe.program()
            assert isinstance(spec, ProgramSpec)
            module, _, name = spec.path.partition(":")
            from reef_cli.trainer.program import Program

            assert issubclass(getattr(importlib.import_module(module), name), Program)

    def test_its_examples_load_and_its_readme_stands(self, path: str) -> None:
        folder = ROOT / path.split(".")[1]
        assert (folder / "README.md").is_file()
        examples = sorted(folder.glob("examples/**/*.yaml"))
        assert examples
        for example in examples:
            assert load([], {}, example).recipe is resolve_recipe(path)
