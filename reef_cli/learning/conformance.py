"""What every recipe keeps to, so that a deployment can rely on any of them: the checks behind `reef recipe check`.

Each check is a function that returns what is wrong, or nothing. They look at the class, ask it about made-up records and
reports, and build its program. Knows no particular method.
"""

import dataclasses
import importlib
import inspect
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reef_cli.config.docs import field_docs
from reef_cli.config.load import load
from reef_cli.config.recipes import resolve_recipe
from reef_cli.core.errors import ReefError
from reef_cli.core.ids import RecordId, new_id
from reef_cli.core.types import Cadence, Inference, Report, Sample, Surface, TokenSpan, TokenTrace
from reef_cli.learning.contract import (
    Acquisition,
    Assembling,
    Combining,
    Group,
    Grouping,
    ProgramSpec,
    RecipeSettings,
    Refusal,
    Signal,
    Target,
    Tools,
)

VERSION = "s@r1-00000000"
STEPS: Mapping[str, int] = {VERSION: 1}
TRACE = TokenTrace((1, 2), (3, 4), (-0.5, -0.25), (1, 1), (TokenSpan(VERSION, 0, 2),))
METADATA: Mapping[str, Any] = {
    "group": "g", "rollout": 0, "step": 0, "role": "solver",
    "demonstration": "z", "teacher_context": "z", "teacher_answer": "z",
}  # fmt: skip
HEAVY = ("torch", "transformers", "deepspeed", "aiohttp")

UNSOUND: Mapping[str, Mapping[str, Any]] = {
    "no tokens": {"tokens": None},
    "incomplete": {"complete": False},
    "empty": {"tokens": TokenTrace((1,), (), (), (), ())},
    "positive log-prob": {"tokens": TokenTrace((1,), (2,), (0.5,), (1,), (TokenSpan(VERSION, 0, 1),))},
    "span gap": {"tokens": TokenTrace((1,), (2,), (-0.5,), (1,), ())},
    "foreign weights": {"tokens": TokenTrace((1,), (2,), (-0.5,), (1,), (TokenSpan("other@r1-00000000", 0, 1),))},
}
"""Records no weights may be trained on, by what is wrong with them."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One check of one recipe; `fault` is empty when it holds."""

    check: str
    fault: str = ""


def check(path: str) -> list[Finding]:
    """All checks of the recipe at `module:Class`. Raises `RecipeNotFound`, `ConfigError` when it cannot be imported."""
    recipe = resolve_recipe(path)
    return [Finding(name, "; ".join(found(path, recipe))) for name, found in CHECKS.items()]


def record(**changes: Any) -> Inference:
    """A made-up exchange with a sound trace."""
    facts: dict[str, Any] = {
        "id": RecordId(new_id()),
        "scenario": "s",
        "created_at": 1.0,
        "dialect": "chat",
        "model": "m",
        "request": b"{}",
        "messages": [{"role": "user", "content": "x"}],
        "response": {"role": "assistant", "content": "y"},
        "tokens": TRACE,
    }
    return Inference(**{**facts, **changes})


def report(*records: Inference, **changes: Any) -> Report:
    """A made-up report with the metadata shipped recipes look at."""
    facts: dict[str, Any] = {"score": 1.0, "metadata": METADATA}
    return Report(RecordId(new_id()), "s", 2.0, tuple(one.id for one in records), **{**facts, **changes})


# -- the checks ------------------------------------------------------------------------------------------------------------


def _names(path: str, recipe: type[Any]) -> Iterator[str]:
    del path
    if not str(getattr(recipe, "name", "")).isidentifier():
        yield "its name is no identifier"
    if not getattr(recipe, "title", "") or not recipe.__doc__:
        yield "it has no title or no docstring"
    kinds: Mapping[str, type] = {"surface": Surface, "cadence": Cadence, "acquisition": Acquisition, "target": Target}
    for name, kind in (*kinds.items(), ("signal", Signal)):
        if not isinstance(getattr(recipe, name, None), kind):
            yield f"{name} is no {kind.__name__}"


def _settings(path: str, recipe: type[Any]) -> Iterator[str]:
    del path
    settings = recipe.settings_type
    if not issubclass(settings, RecipeSettings):
        yield "its settings do not extend RecipeSettings"
    if not settings.__dataclass_params__.frozen:
        yield "its settings are not frozen"
    docs = field_docs(settings)
    for field in dataclasses.fields(settings):
        if not docs.get(field.name):
            yield f"the setting {field.name} has no docstring"


def _light(path: str, recipe: type[Any]) -> Iterator[str]:
    del recipe
    module = path.partition(":")[0]
    code = f"import sys, {module}; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    done = _python(code)
    if done.returncode:
        yield done.stderr.strip().splitlines()[-1]
    elif dragged := done.stdout.split():
        yield f"the server half imports {', '.join(dragged)}"


def _admission(path: str, recipe: type[Any]) -> Iterator[str]:
    del path
    made, one = recipe(recipe.settings_type()), record()
    for told in (report(one), report(one, score=None, feedback="hm"), report(one, metadata={})):
        first, second = made.admit(told, [one], STEPS), made.admit(told, [one], STEPS)
        if first != second:
            yield "admit says different things of the same report"
        if isinstance(first, Refusal) and not first.reason.replace("_", "").isalnum():
            yield f"the reason {first.reason!r} is no stable name"
        if not isinstance(first, Sample | Refusal):
            yield f"admit returned {type(first).__name__}"
        if isinstance(first, Sample) and recipe.surface is Surface.WEIGHTS:
            yield from _sample(first, one)


def _sample(sample: Sample, one: Inference) -> Iterator[str]:
    if sample.records != (one.id,):
        yield "a sample does not name its records"
    if sample.step != STEPS[VERSION] or sample.producing != (VERSION,):
        yield "a sample does not name the oldest weights that made it"


def _soundness(path: str, recipe: type[Any]) -> Iterator[str]:
    del path
    if recipe.surface is not Surface.WEIGHTS:
        return
    made = recipe(recipe.settings_type())
    for what, changes in UNSOUND.items():
        one = record(**changes)
        if not isinstance(made.admit(report(one), [one], STEPS), Refusal):
            yield f"a record with {what} makes a sample"


def _batches(path: str, recipe: type[Any]) -> Iterator[str]:
    del path
    made, one = recipe(recipe.settings_type()), record()
    sample = made.admit(report(one), [one], STEPS)
    if not isinstance(sample, Sample):
        return
    if isinstance(made, Grouping):
        group = made.group(sample)
        if not isinstance(group, Group) or group.size < 1 or group != made.group(sample):
            yield "group does not name a group"
    if isinstance(made, Assembling):
        done = list(made.assemble([sample], Tools()))
        if [after.id for after in done] != [sample.id]:
            yield "assemble loses or invents samples"


def _members(path: str, recipe: type[Any]) -> Iterator[str]:
    del path
    made = recipe(recipe.settings_type())
    for index, member in enumerate(made.members() if isinstance(made, Combining) else ()):
        if isinstance(member, Combining):
            yield f"its member {member.name} is a composite itself"
        if member.surface in [other.surface for other in made.members()[:index]]:
            yield f"its member {member.name} changes the {member.surface}, as another does"


def _program(path: str, recipe: type[Any]) -> Iterator[str]:
    del path
    if recipe.surface is not Surface.WEIGHTS:
        return
    spec = recipe(recipe.settings_type()).program()
    if not isinstance(spec, ProgramSpec):
        yield "program returns no ProgramSpec"
        return
    module, _, name = spec.path.partition(":")
    try:
        getattr(importlib.import_module(module), name)(spec.settings)
    except Exception as error:  # somebody's own code: whatever it raises is the finding
        yield f"{spec.path}: {type(error).__name__}: {error}"


def _folder(path: str, recipe: type[Any]) -> Iterator[str]:
    folder = Path(inspect.getfile(recipe)).parent
    readme = folder / "README.md"
    if not readme.is_file():
        yield f"{folder.name}/README.md is missing"
    else:
        text = readme.read_text(encoding="utf-8")
        own = {f.name for f in dataclasses.fields(recipe.settings_type)} - {f.name for f in dataclasses.fields(RecipeSettings)}
        if missing := sorted(name for name in own if f"`{name}`" not in text):
            yield f"{folder.name}/README.md does not name {', '.join(missing)}"
    examples = sorted(folder.glob("examples/**/*.yaml"))
    if not examples:
        yield f"{folder.name}/examples has no serve.yaml"
    for example in examples:
        for kind in ("embedded", "sglang") if recipe.surface is Surface.WEIGHTS else ("",):
            try:
                found = load(["--engine.kind", kind] if kind else [], {}, example).recipe
            except ReefError as error:
                yield f"{example.name}: {error.message}"
                continue
            if found is not resolve_recipe(path):
                yield f"{example.name} names another recipe"


def _python(code: str) -> subprocess.CompletedProcess[str]:
    places = [place for place in sys.path if place] + [str(Path.cwd())]
    lead = f"import sys; sys.path[:0] = [p for p in {places!r} if p not in sys.path]; "
    return subprocess.run([sys.executable, "-c", lead + code], capture_output=True, text=True, check=False, timeout=300)


CHECKS: Mapping[str, Callable[[str, type[Any]], Iterator[str]]] = {
    "says what it is": _names,
    "settings are frozen and documented": _settings,
    "the server half is light": _light,
    "admission is pure and names its reasons": _admission,
    "unsound records never train weights": _soundness,
    "groups and batches are whole": _batches,
    "members of a composite keep apart": _members,
    "the tensor half exists and takes its settings": _program,
    "README and examples stand": _folder,
}
