"""`reef scenario`: the workloads of a server."""

from typing import Annotated, Any

import typer

from reef_cli.commands import output
from reef_cli.commands.shell import (
    DryRun,
    Shell,
    Yes,
    confirm,
    items,
    new_app,
    release_id_of,
    scenario_name,
    scenario_path,
    with_shell,
)

app = new_app("List, create, pause, resume and archive scenarios")

Name = Annotated[str, typer.Argument(metavar="SCENARIO", help="Scenario")]


@app.command("list")
@with_shell()
def list_scenarios(shell: Shell) -> None:
    """List scenarios"""
    answer = shell.client.get("/reef/scenarios")
    rows = items(answer, "scenarios")
    shell.emit({"scenarios": rows}, lambda: output.table(("scenario", "mode", "state", "head", "made"), map(_row, rows)))


@app.command()
@with_shell()
def create(
    shell: Shell,
    name: Name,
    release_id: Annotated[str | None, typer.Option("--release-id", help="Release to start from")] = None,
) -> None:
    """Create a scenario; one that exists is left as it is"""
    body = {"name": name} | ({"release_id": release_id} if release_id else {})
    answer = shell.client.request("POST", "/reef/scenarios", body)
    word = "created" if answer.status == 201 else "exists already"
    shell.emit({"scenario": name, "created": answer.status == 201}, lambda: print(f"{name} {word}"))


@app.command()
@with_shell()
def pause(shell: Shell, name: Name) -> None:
    """Stop starting jobs; serving goes on"""
    _post(shell, name, "pause", None, "paused")


@app.command()
@with_shell()
def resume(shell: Shell, name: Name) -> None:
    """Start jobs again"""
    _post(shell, name, "resume", None, "resumed")


@app.command()
@with_shell()
def mode(shell: Shell, name: Name, training_mode: Annotated[str, typer.Argument(help="auto, manual or hybrid")]) -> None:
    """Set when jobs start: by themselves, on instruction, or both"""
    _post(shell, name, "update", {"training_mode": training_mode}, f"set to {training_mode}")


@app.command()
@with_shell()
def archive(shell: Shell, name: Name, yes: Yes = False, dry_run: DryRun = False) -> None:
    """Archive a scenario: it serves and learns no more; its records and releases stay"""
    if not dry_run:
        confirm(f"Archive {name}?", yes=yes, required=True)
        shell.client.request("DELETE", scenario_path(name))
    word = "would be archived" if dry_run else "archived"
    shell.emit({"scenario": name, "archived": not dry_run, "dry_run": dry_run}, lambda: print(f"{name} {word}"))


def _post(shell: Shell, name: str, verb: str, body: Any, done: str) -> None:
    answer = shell.client.post(scenario_path(name, verb), body)
    shell.emit(answer if answer is not None else {"scenario": name, verb: True}, lambda: print(f"{name} {done}"))


def _row(row: dict[str, Any]) -> list[object]:
    head_id = release_id_of(row.get("head"))
    state = "archived" if row.get("archived_at") else "paused" if row.get("paused") else row.get("state") or "active"
    mode_name = row.get("training_mode") or row.get("mode")
    return [scenario_name(row), mode_name, state, head_id, output.age(row.get("created_at"))]
