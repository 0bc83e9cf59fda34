"""`reef recipe`: the learning methods at hand and their settings, from the code; new ones, and the checks of the contract."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from reef_cli.commands import output
from reef_cli.commands.shell import Shell, new_app, with_shell
from reef_cli.config.docs import field_docs, summary
from reef_cli.config.keys import keys_of
from reef_cli.config.recipes import resolve_recipe, scan_recipes
from reef_cli.config.values import describe
from reef_cli.core.errors import RecipeNotFound
from reef_cli.harness.resources import template
from reef_cli.learning import conformance
from reef_cli.learning.scaffold import new_recipe

_RECIPE = typer.Argument(metavar="RECIPE", help="Name or dotted path module:Class")
_FACTS = ("surface", "cadence", "signal", "acquisition", "target")

app = new_app("List recipes, show their settings, make and check your own")


@app.command("list")
@with_shell(local=True)
def list_recipes(shell: Shell) -> None:
    """List the recipes of this installation and of ./recipes"""
    found = [facts(path, recipe) for path, recipe in scan_recipes()]
    columns = ("recipe", "learning signal", "acquisition", "evolves", "cadence", "what it does")
    axes = ("signal", "acquisition", "target", "cadence")
    rows = [[f["name"], *(f[axis] for axis in axes), f["error"] or f["title"]] for f in found]
    shell.emit({"recipes": found}, lambda: output.table(columns, rows))
    if found:
        shell.hint(f"reef recipe show {found[0]['name']}")


@app.command()
@with_shell(local=True)
def show(shell: Shell, name: Annotated[str, _RECIPE]) -> None:
    """Show a recipe's settings with their documentation and defaults"""
    path, recipe = _find(name)
    data = {**facts(path, recipe), "settings": settings_of(recipe)}
    shell.emit(data, lambda: _draw(recipe, data))


@app.command("new")
@with_shell(local=True)
def new(shell: Shell, name: Annotated[str, typer.Argument(metavar="NAME", help="Lower-case letters, digits and _")]) -> None:
    """Make a recipe of your own in ./recipes, ready to run and to change"""
    folder = new_recipe(name, Path.cwd() / "recipes", template)
    files = sorted(str(file.relative_to(Path.cwd())) for file in folder.rglob("*") if file.is_file())
    shell.emit({"name": name, "files": files}, lambda: output.block("\n".join(files)))
    shell.hint(f"reef recipe check {name}")


@app.command("check")
@with_shell(local=True)
def check(shell: Shell, name: Annotated[str, _RECIPE]) -> None:
    """Check that a recipe keeps to the contract"""
    path, _ = _find(name)
    found = conformance.check(path)
    rows = [["ok" if not one.fault else "fault", one.check, one.fault] for one in found]
    faults = sum(bool(one.fault) for one in found)
    data = {"recipe": path, "faults": faults, "checks": [dataclasses.asdict(one) for one in found]}
    shell.emit(data, lambda: output.table(("", "check", "what is wrong"), rows))
    if faults:
        raise typer.Exit(1)


def facts(path: str, recipe: type[Any] | Exception) -> dict[str, Any]:
    """What a list shows of a recipe, or why it cannot be imported."""
    if isinstance(recipe, Exception):
        return {"name": path.split(".")[1], "path": path, **dict.fromkeys((*_FACTS, "title")), "error": str(recipe)}
    title = getattr(recipe, "title", None) or summary(recipe)
    words = {fact: _word(getattr(recipe, fact, None)) for fact in _FACTS}
    return {"name": recipe.name, "path": path, **words, "title": title, "error": None}


def settings_of(recipe: type[Any]) -> list[dict[str, Any]]:
    """Every setting: name, type in words, default, documentation."""
    docs = field_docs(recipe.settings_type)
    return [
        {
            "name": key.name,
            "type": describe(key.annotation),
            "required": key.default is dataclasses.MISSING,
            "default": None if key.default is dataclasses.MISSING else key.default,
            "doc": docs.get(key.name, ""),
        }
        for key in keys_of(recipe.settings_type, "reef", recipe=True)
    ]


def _find(name: str) -> tuple[str, type[Any]]:
    if ":" in name:
        return name, resolve_recipe(name)
    known = {recipe.name: (path, recipe) for path, recipe in scan_recipes() if not isinstance(recipe, Exception)}
    if name not in known:
        raise RecipeNotFound(
            f"there is no recipe {name!r}", why=f"known: {', '.join(known) or 'none'}", hint="see: reef recipe list"
        )
    return known[name]


def _draw(recipe: type[Any], data: dict[str, Any]) -> None:
    output.pairs((name, data[name]) for name in ("name", "title", *_FACTS, "path"))
    output.block(f"\n{summary(recipe)}\n")
    rows = [(s["name"], "required" if s["required"] else _shown(s["default"]), s["type"], s["doc"]) for s in data["settings"]]
    output.table(("setting", "default", "type", "meaning"), rows)
    output.block(f"\nserve.yaml:\n  reef:\n    recipe: {data['path']}")


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _word(value: Any) -> str | None:
    return None if value is None else str(getattr(value, "value", value))
