"""`reef model`: models in the cache that all homes share."""

import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from reef_cli.commands import output
from reef_cli.commands.shell import Shell, new_app, with_shell
from reef_cli.config.paths import cache_at
from reef_cli.config.schema import DEFAULT_MODEL

app = new_app("Get models into the cache and list them")


@app.command()
@with_shell(local=True)
def pull(shell: Shell, name: Annotated[str, typer.Argument(help="Known name, folder or hub id")] = DEFAULT_MODEL) -> None:
    """Get a model into the cache; a broken download leaves nothing behind"""
    path = _store(shell).pull(name, progress(shell))
    shell.emit({"model": name, "path": str(path)}, lambda: print(path))
    shell.hint(f"reef serve --engine.model {name}")


@app.command("list")
@with_shell(local=True)
def list_models(shell: Shell) -> None:
    """List models in the cache and names that can be pulled"""
    rows = [_facts(entry) for entry in _store(shell).list()]
    columns = ("model", "present", "size", "path")
    shown = [
        [row.get("name"), "yes" if row.get("present", True) else "no", output.size(row.get("bytes")), row.get("path")]
        for row in rows
    ]
    shell.emit({"models": rows}, lambda: output.table(columns, shown))


def progress(shell: Shell) -> Callable[..., None]:
    """A callback that narrates on stderr, one line rewritten on a terminal; quiet with `--json`."""
    live = sys.stderr.isatty() and not shell.json

    def show(*parts: Any) -> None:
        if shell.json:
            return
        text = " ".join(str(part) for part in parts if part is not None)
        if live:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
        elif not text.replace(" ", "").isdigit():
            output.say(text)

    return show


def _store(shell: Shell) -> Any:
    from reef_cli.engines.models import ModelStore

    return ModelStore(cache_at(shell.environ))


def _facts(entry: Any) -> dict[str, Any]:
    """A listed model as JSON, whether the store gives mappings or dataclasses."""
    import dataclasses

    if dataclasses.is_dataclass(entry) and not isinstance(entry, type):
        entry = dataclasses.asdict(entry)
    return dict(entry) if isinstance(entry, dict) else {"name": str(entry)}
