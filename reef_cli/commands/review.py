"""`reef release review`: what waits for a person, one by one, with all there is to decide by, and the decision.

A promotion sends the head that was shown along: when another move came in between, it loses and says so. Without a terminal
nothing is asked and nothing moves.
"""

import sys
from collections.abc import Callable
from typing import Any, Literal

import typer

from reef_cli.commands import output
from reef_cli.commands.chain import Chains, Row, current
from reef_cli.commands.evidence import draw_diff, draw_evidence
from reef_cli.commands.shell import Shell
from reef_cli.core.errors import ReefError
from reef_cli.core.types import Surface

Choice = Literal["promote", "dismiss", "skip", "quit"]
_CHOICES: dict[str, Choice] = {"p": "promote", "d": "dismiss", "s": "skip", "q": "quit"}


def pending(chains: Chains, scenario: str | None) -> list[Row]:
    """Held releases, oldest first: with its head, and what it would change, in each row."""
    found = []
    for name in [scenario] if scenario else chains.scenarios():
        rows = chains.releases(name)
        held = [row for row in rows if row.get("pending")]
        heads = {row["surface"]: current(rows, name, Surface(row["surface"]))["release_id"] for row in held}
        found += [{**row, "scenario": name, "head": heads[row["surface"]]} for row in reversed(held)]
    return found


def with_diff(chains: Chains, row: Row) -> Row:
    """The row with the changes against the head; what cannot be compared says why."""
    try:
        return {**row, "changes": chains.diff(row["scenario"], str(row["head"]), str(row["release_id"]))}
    except ReefError as error:
        return {**row, "changes": {"error": error.message}}


def run(shell: Shell, chains: Chains, scenario: str | None) -> None:
    """Show everything; on a terminal ask about each."""
    rows = [with_diff(chains, row) for row in pending(chains, scenario)]
    if shell.json:
        output.as_json({"pending": rows})
        return
    if not rows:
        output.say("nothing waits")
        return
    if not _can_ask():
        for row in rows:
            draw(row)
        shell.hint(f"reef release promote {rows[0]['release_id']} -s {rows[0]['scenario']}")
        return
    moved: set[str] = set()
    for row in rows:
        # A promotion before this one moved the head of the same chain; the person is shown the new one.
        fresh = _again(chains, row) if row["scenario"] in moved else row
        if fresh is None:
            continue
        draw(fresh)
        choice = _ask()
        if choice == "quit":
            return
        if choice != "skip" and _decide(chains, fresh, choice):
            moved.add(fresh["scenario"])


def draw(row: Row) -> None:
    """One held release with its evidence, the diff against the head, and samples side by side."""
    made = f"{row.get('kind')} by {row.get('author')}, {output.age(row.get('recorded_at'))} ago"
    output.block(f"{row['release_id']} of {row['scenario']}, {made}")
    output.pairs([("would follow", row.get("head")), ("content", row.get("content_id"))])
    draw_evidence(row.get("evidence"))
    print()
    changes = row.get("changes") or {}
    if "error" in changes:
        output.say(f"no diff: {changes['error']}")
    else:
        draw_diff(changes)
    print()


def _can_ask() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


def _ask() -> Choice:
    while True:
        answer = typer.prompt("[p]romote, [d]ismiss, [s]kip, [q]uit", err=True, default="s").strip().lower()
        if answer[:1] in _CHOICES:
            return _CHOICES[answer[:1]]


def _decide(chains: Chains, row: Row, choice: Choice) -> bool:
    """Do what was chosen; whether the head moved. A lost race is told, and the review goes on."""
    scenario, release_id = row["scenario"], str(row["release_id"])
    act: Callable[[], Any] = lambda: chains.dismiss(scenario, release_id)  # noqa: E731
    if choice == "promote":
        act = lambda: chains.promote(scenario, release_id, str(row["head"]))  # noqa: E731
    try:
        done = act()
    except ReefError as error:
        output.say(f"not done: {error.message}" + (f"; {error.hint}" if error.hint else ""))
        return True
    output.block(f"{scenario} serves {done['release_id']}" if choice == "promote" else f"{release_id} is dismissed")
    return choice == "promote"


def _again(chains: Chains, row: Row) -> Row | None:
    rows = pending(chains, row["scenario"])
    found = next((other for other in rows if other["release_id"] == row["release_id"]), None)
    return with_diff(chains, found) if found else None
