"""`reef sessions`: conversations and agent runs, and the tree of one."""

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from reef_cli.commands import output
from reef_cli.commands.shell import Scenario, Shell, items, new_app, scenario_path, with_shell
from reef_cli.control.plain import one_line

_COLUMNS = ("receipt", "role", "release", "trainable", "score", "text")

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
    columns = ("session", "last", "turns", "tokens", "trainable", "text")
    shell.emit({"scenario": scenario, "sessions": rows}, lambda: output.table(columns, map(_row, rows)))
    if rows:
        shell.hint(f"reef sessions show {rows[0].get('session')} -s {scenario}")


@app.command()
@with_shell()
def show(shell: Shell, session: Annotated[str, typer.Argument(help="Session")], scenario: Scenario = "default") -> None:
    """Show one session as a tree of branches, with the tokens of each that can train"""
    answer = shell.client.get(scenario_path(scenario, "sessions", session))
    shell.emit(answer, lambda: _draw(answer))


def _row(row: dict[str, Any]) -> list[object]:
    last = row.get("last_at") or row.get("started_at")
    return [
        row.get("session"),
        output.age(last),
        row.get("turns"),
        row.get("output_tokens"),
        row.get("trainable_tokens"),
        one_line(row.get("summary") or "", 80),
    ]


def _draw(tree: dict[str, Any]) -> None:
    """Branches below the one they left, each with what of it can train; retries that nothing continued stand at the end."""
    branches = items(tree, "branches")
    for branch, depth in _nested(branches, None, 0):
        indent = "  " * depth
        output.block(
            f"{indent}branch {branch.get('index')} ({branch.get('kind', 'main')}){_origin(branch)}: {_amounts(branch)}"
        )
        output.table(_COLUMNS, [_turn(turn, indent) for turn in items(branch, "turns")])
    if retries := items(tree, "retries"):
        output.block(f"retries: {len(retries)}, none trains")
        output.table(_COLUMNS, [_turn(turn, "") for turn in retries])


def _nested(branches: list[dict[str, Any]], parent: int | None, depth: int) -> Iterator[tuple[dict[str, Any], int]]:
    for branch in branches:
        if branch.get("parent") == parent:
            yield branch, depth
            yield from _nested(branches, branch.get("index"), depth + 1)


def _origin(branch: dict[str, Any]) -> str:
    return f" from {branch['forked_from']}" if branch.get("forked_from") else ""


def _amounts(branch: dict[str, Any]) -> str:
    turns = items(branch, "turns")
    written = sum(int((turn.get("row") or {}).get("output_tokens") or 0) for turn in turns)
    return f"{len(turns)} calls, {branch.get('trainable_tokens', 0)} of {written} output tokens can train"


def _turn(turn: dict[str, Any], indent: str) -> list[object]:
    row = turn.get("row") if isinstance(turn.get("row"), dict) else turn
    assert isinstance(row, dict)
    receipt = row.get("agent_record_id") or row.get("id")
    score = output.number(turn.get("score"), 2)
    trainable = row.get("trainable_tokens")
    return [
        f"{indent}  {receipt}",
        row.get("role"),
        row.get("release_id"),
        trainable,
        score,
        one_line(row.get("summary") or "", 80),
    ]
