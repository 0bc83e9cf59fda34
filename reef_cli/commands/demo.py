"""`reef demo`: the whole loop on this machine, in a temporary home. The show itself is `reef_cli.demo`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from reef_cli.commands.shell import Json, new_app

app = new_app()


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What a person may choose; None leaves it to the demo."""

    recipe: str
    json: bool
    steps: int | None
    model: str | None
    home: Path | None
    keep: bool
    seed: int | None


@app.command()
def demo(
    recipe: Annotated[str, typer.Option("--recipe", help="Which one learns: sao, openclawrl")] = "sao",
    json: Json = False,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Learning steps at most")] = None,
    model: Annotated[str | None, typer.Option("--model", help="Model name or folder")] = None,
    home: Annotated[Path | None, typer.Option("--home", help="Home to use and keep  [default: a temporary one]")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the temporary home")] = False,
    seed: Annotated[int | None, typer.Option("--seed", help="Seed of the scripted user")] = None,
) -> int:
    """Watch a small model learn from a scripted user, be released and rolled back; takes minutes on two cores"""
    from reef_cli.demo import run

    return int(run(DemoOptions(recipe=recipe, json=json, steps=steps, model=model, home=home, keep=keep, seed=seed)))
