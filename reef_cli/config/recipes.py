"""Finding recipes: by dotted path for a deployment, by scanning the `recipes` namespace for `reef recipe list`.

`recipes` is a namespace package, so the shipped recipes, those of the working folder and installed ones stand side by side.
Only the light half is imported; a recipe that drags torch into the server is refused.
"""

import importlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, is_dataclass
from pathlib import Path
from typing import Any

from reef_cli.config.keys import closest, keys_of
from reef_cli.config.values import Misfit, coerce
from reef_cli.core.errors import ConfigError, MissingDependency, RecipeNotFound

_HEAVY = ("torch", "transformers", "deepspeed", "jax", "tensorflow")
_PLACES = "recipe: recipes.sao.recipe:SAORecipe names a class in recipes/sao/recipe.py; see: reef recipe list"


def resolve_recipe(path: str) -> type[Any]:
    """The recipe class at `module:Class`. `RecipeNotFound` when there is none, `ConfigError` when its code is unsound."""
    module_name, colon, class_name = path.partition(":")
    if not colon or not module_name or not class_name:
        raise RecipeNotFound(f"{path!r} is no dotted path of a recipe", why="it has the form module:Class", hint=_PLACES)
    module = _import(module_name, path)
    found = getattr(module, class_name, None)
    if found is None:
        from difflib import get_close_matches

        close = get_close_matches(class_name, vars(module), 1)
        hint = f"did you mean {module_name}:{close[0]}?" if close else _PLACES
        raise RecipeNotFound(f"{module_name} has no class {class_name}", hint=hint)
    if not is_recipe(found):
        raise RecipeNotFound(
            f"{path} is no recipe", why="it lacks settings_type, admit or name", hint="see reef_cli/learning/contract.py"
        )
    assert isinstance(found, type)
    return found


def is_recipe(found: object) -> bool:
    """Whether an object has a recipe's shape."""
    settings = getattr(found, "settings_type", None)
    return isinstance(found, type) and isinstance(settings, type) and is_dataclass(settings) and hasattr(found, "name")


def make_recipe(path: str, given: Mapping[str, Any], place: str) -> Any:
    """A recipe with settings that were given as data, at `place` in the file.

    Raises `RecipeNotFound`, and `ConfigError` for a key the recipe has not or a value that does not fit.
    """
    recipe = resolve_recipe(path)
    keys = {key.name: key for key in keys_of(recipe.settings_type, "reef", recipe=True)}
    for name in given:
        if name not in keys:
            close = closest(str(name), keys)
            hint = f"did you mean {close}?" if close else f"see: reef recipe show {path}"
            raise ConfigError(f"{place}: {recipe.name} has no setting {str(name)[:64]!r}", hint=hint)
    if missing := [key.name for key in keys.values() if key.default is MISSING and key.name not in given]:
        raise ConfigError(f"{place}: {recipe.name} needs {missing[0]}", hint=f"see: reef recipe show {path}")
    try:
        values = {name: coerce(value, keys[name].annotation) for name, value in given.items()}
        return recipe(recipe.settings_type(**values))
    except (Misfit, ValueError, TypeError) as error:
        hint = getattr(error, "hint", "")
        raise ConfigError(f"{place}: {recipe.name} refuses its settings", why=str(error), hint=hint) from error


def scan_recipes() -> Iterator[tuple[str, type[Any] | Exception]]:
    """`(dotted path, class or why it cannot be imported)` of every recipe in the `recipes` namespace."""
    look_here()
    try:
        namespace = importlib.import_module("recipes")
    except ModuleNotFoundError:
        return
    # pkgutil.iter_modules overlooks folders without __init__.py, which a person's own recipe usually is.
    found = {file.parent.name for place in namespace.__path__ for file in Path(place).glob("*/recipe.py")}
    for name in (f"recipes.{folder}.recipe" for folder in sorted(found) if folder.isidentifier()):
        try:
            loaded = _import(name, name)
        except (RecipeNotFound, ConfigError, MissingDependency) as error:
            yield name, error
            continue
        for attribute, value in vars(loaded).items():
            if is_recipe(value) and value.__module__ == name:
                yield f"{name}:{attribute}", value


def look_here() -> None:
    """Let imports find the working folder's `recipes/`, after everything installed so that nothing is shadowed."""
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
        importlib.invalidate_caches()


def _import(name: str, path: str) -> Any:
    look_here()
    before = {heavy for heavy in _HEAVY if heavy in sys.modules}
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise RecipeNotFound(f"no recipe at {path}", why=f"there is no module {error.name}", hint=_PLACES) from error
        raise MissingDependency(f"the recipe {path} needs {error.name}", hint=f"pip install {error.name}") from error
    except Exception as error:
        # A recipe is other people's code: whatever it raises while importing is a fault of the configuration.
        raise ConfigError(f"the recipe {path} cannot be imported", why=f"{type(error).__name__}: {error}") from error
    if dragged := [heavy for heavy in _HEAVY if heavy in sys.modules and heavy not in before]:
        raise ConfigError(
            f"the recipe {path} imports {dragged[0]} into the server",
            why="this half of a recipe must import in milliseconds",
            hint="move the tensor half behind program() into its own module",
        )
    return module
