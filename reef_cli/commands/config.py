"""`reef config`: check, show and describe `serve.yaml`."""

from pathlib import Path
from typing import Annotated

import typer

from reef_cli.commands import output
from reef_cli.commands.serve import load_for
from reef_cli.commands.shell import Shell, new_app, with_shell
from reef_cli.core.errors import ConfigError, RecipeNotFound, ReefError

app = new_app("Check and show configuration, print its schema")

_EXTRA = {"allow_extra_args": True, "ignore_unknown_options": True}
ConfigFile = Annotated[Path | None, typer.Option("--config", "-c", help="serve.yaml to read")]


@app.command()
@with_shell(local=True)
def check(
    shell: Shell, ctx: typer.Context, file: Annotated[Path, typer.Argument(metavar="FILE", help="serve.yaml to check")]
) -> int:
    """Check a file with the environment over it; lists every problem and exits 2"""
    try:
        load_for(shell, ctx, file)
    except (ConfigError, RecipeNotFound) as error:
        return _problems(shell, file, error)
    shell.emit({"file": str(file), "ok": True, "problems": []}, lambda: print(f"{file} is sound"))
    shell.hint(f"reef serve -c {file}")
    return 0


def _problems(shell: Shell, file: Path, error: ReefError) -> int:
    first = {"message": error.message, "why": error.why, "hint": error.hint, "key": ""}
    problems = error.details.get("problems") or [first]
    rows = [(p["message"], p["why"], p["hint"]) for p in problems]
    shell.emit(
        {"file": str(file), "ok": False, "problems": problems}, lambda: output.table(("problem", "why", "what to do"), rows)
    )
    shell.say(f"{len(problems)} problem{'s' if len(problems) > 1 else ''} in {file}")
    return ConfigError.exit_code


@app.command(context_settings=_EXTRA)
@with_shell(local=True)
def show(
    shell: Shell,
    ctx: typer.Context,
    config: ConfigFile = None,
    origin: Annotated[bool, typer.Option("--origin", help="One line a key with where its value comes from")] = False,
    changed: Annotated[bool, typer.Option("--changed", help="Leave defaults out")] = False,
) -> None:
    """Show the settings that `reef serve` would use, secrets masked"""
    from reef_cli.config.load import DEFAULT
    from reef_cli.config.render import render_config, rows_of

    loaded = load_for(shell, ctx, config)
    rows = [
        (f"{section}.{name}", value, where)
        for section, name, value, where in rows_of(loaded)
        if not (changed and where == DEFAULT)
    ]
    data = {"config": [{"key": key, "value": value, "origin": where} for key, value, where in rows]}
    if origin:
        shell.emit(data, lambda: output.table(("key", "value", "origin"), rows))
    else:
        shell.emit(data, lambda: print(render_config(loaded, mask=True, changed_only=changed), end=""))


@app.command()
@with_shell(local=True)
def schema(
    shell: Shell,
    recipe: Annotated[str | None, typer.Option("--recipe", help="Dotted path whose settings the schema should know")] = None,
) -> None:
    """Print the JSON Schema of serve.yaml, for editors"""
    from reef_cli.config.json_schema import settings_schema
    from reef_cli.config.recipes import resolve_recipe

    document = settings_schema(resolve_recipe(recipe) if recipe else None)
    shell.emit(document, lambda: output.as_json(document))
