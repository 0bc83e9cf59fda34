"""`reef sessions`: conversations and agent runs, and the tree of one."""

from typing import Annotated, Any

import typer

from reef_cli.commands import output
from reef_cli.commands.shell import Scenario, Shell, items, new_app, scenario_path, with_shell
from reef_cli.control.plain import one_line

app = new_app("List sessions and show their trees")


@app.command("list")
@with_shell()
def list_sessions(
    shell: Shell,
    scenario: Scenario = "default",
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=1000, help="At most this many")] = 20,
) -> None:
    """List sessions, the latest first"""
    rows = items(shell.client.get(scenario_path(scenario, "sessions"), limit=limit), "sessions")
    columns = ("session", "last", "turns", "tokens", "text")
    shell.emit({"scenario": scenario, "sessions": rows}, lambda: output.table(columns, map(_row, rows)))
    if rows:
        shell.hint(f"reef sessions show {rows[0].get('session')} -s {scenario}")


@app.command()
@with_shell()
def show(shell: Shell, session: Annotated[str, typer.Argument(help="Session")], scenario: Scenario = "default") -> None:
    """Show one session as a tree of branches"""
    answer = shell.client.get(scenario_path(scenario, "sessions", session))
    shell.emit(answer, lambda: _draw(answer))


def _row(row: dict[str, Any]) -> list[object]:
    last = row.get("last_at") or row.get("started_at")
    return [
        row.get("session"),
        output.age(last),
        row.get("turns"),
        row.get("output_tokens"),
        one_line(row.get("summary") or "", 80),
    ]


def _draw(tree: dict[str, Any]) -> None:
    for branch in items(tree, "branches"):
        origin = f" from {branch['forked_from']}" if branch.get("forked_from") else ""
        output.block(f"branch {branch.get('index')} ({branch.get('kind', 'main')}){origin}")
        output.table(("receipt", "role", "release", "score", "text"), map(_turn, items(branch, "turns")))


def _turn(turn: dict[str, Any]) -> list[object]:
    row = turn.get("row") if isinstance(turn.get("row"), dict) else turn
    assert isinstance(row, dict)
    receipt = row.get("agent_record_id") or row.get("id")
    score = output.number(turn.get("score"), 2)
    return [f"  {receipt}", row.get("role"), row.get("release_id"), score, one_line(row.get("summary") or "", 80)]
