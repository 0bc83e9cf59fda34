"""`reef eval`: score releases on a suite, compare them, and see whether a chain got better."""

from pathlib import Path
from typing import Annotated, Any

import typer

from reef_cli.commands import output
from reef_cli.commands.chain import chains_of, find, main_head
from reef_cli.commands.progress import evaluation_bar
from reef_cli.commands.shell import Scenario, Shell, new_app, scenario_path, with_shell
from reef_cli.core.errors import GateRefused, UsageError

app = new_app()


@app.command("eval")
@with_shell()
def evaluate(
    shell: Shell,
    releases: Annotated[list[str] | None, typer.Argument(metavar="[RELEASE...]", help="Releases  [default: the head]")] = None,
    scenario: Scenario = "default",
    against: Annotated[str | None, typer.Option("--against", help="What they are compared with; exits 5 when worse")] = None,
    since: Annotated[str | None, typer.Option("--since", help="Instead: the chain from this release to the head")] = None,
    points: Annotated[int | None, typer.Option("--points", min=2, help="Releases of the chain at most  [default: 12]")] = None,
    suite: Annotated[str | None, typer.Option("--suite", help="Suite  [default: the deployment's]")] = None,
    split: Annotated[str | None, typer.Option("--split", help="heldout, development or all")] = None,
    limit: Annotated[int | None, typer.Option("--limit", "-n", min=1, help="At most this many items")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Also draw to this .svg, .html or .png")] = None,
    again: Annotated[bool, typer.Option("--again", help="Ask anew instead of going on with kept answers")] = False,
    timeout_s: Annotated[float, typer.Option("--timeout-s", min=1.0, help="Longest wait")] = 1800.0,
) -> None:
    """Evaluate releases on a suite; a run that was cut goes on where it stopped"""
    body = _subject(shell, scenario, releases or [], against, since)
    # A file of this machine, whatever folder the server runs in.
    suite = str(Path(suite).absolute()) if suite and Path(suite).exists() else suite
    options = {"points": points, "suite": suite, "split": split, "limit": limit, "again": again or None}
    body |= {name: value for name, value in options.items() if value is not None}
    shell.say(f"evaluating {body.get('since') or ', '.join(body.get('releases', ()))} of {scenario}")
    with evaluation_bar(shell, scenario):
        answer: dict[str, Any] = shell.client.post(scenario_path(scenario, "evaluate"), body, timeout_s=timeout_s)
    if plot is not None:
        from reef_cli.commands.plot import save

        save(plot, answer)
        shell.say(f"drawn: {plot}")
    worse = [row["release"] for row in answer.get("differences", ()) if row["result"] == "worse"] if against else []
    if worse:
        if not shell.json:
            _draw(answer)
        raise GateRefused(f"{worse[0]} is worse than {body['against']}", why="shown by paired answers", result=answer)
    shell.emit(answer, lambda: _draw(answer))


def _subject(shell: Shell, scenario: str, releases: list[str], against: str | None, since: str | None) -> dict[str, Any]:
    """What is evaluated, prefixes of ids made whole."""
    rows = chains_of(shell).releases(scenario)

    def whole(name: str) -> str:
        return str(find(rows, scenario, name)["release_id"])

    if since is not None:
        if releases or against is not None:
            raise UsageError("--since names all that is evaluated", why="releases were named too", hint="give one of them")
        return {"since": whole(since)}
    named = [whole(name) for name in releases] or [str(main_head(rows, scenario)["release_id"])]
    return {"releases": named} | ({"against": whole(against)} if against else {})


def _draw(answer: dict[str, Any]) -> None:
    from reef_cli.commands.plot import bar, points_of

    points = points_of(answer)
    terminal = output.on_terminal()
    columns = ["release", "mean", "interval", "items", "missing", "tokens", "money", *(["0 to 1"] if terminal else [])]
    rows = []
    for point, row in zip(points, answer.get("releases", ()), strict=True):
        tokens = row["prompt_tokens"] + row["output_tokens"]
        spread = f"{point.low:.3f} to {point.high:.3f}"
        facts = [point.name, output.number(point.mean), spread, row["items"], row["missing"], tokens, f"{row['money']:.4f}"]
        rows.append([*facts, *([bar(point)] if terminal else [])])
    output.table(columns, rows)
    for row in answer.get("differences", ()):
        print(_told(row))
    if len(points) > 2 and answer.get("differences"):
        print(_trend(answer["differences"][-1]))
    if answer.get("skipped"):
        output.say(f"left out, their bytes are gone: {', '.join(answer['skipped'])}")
    if answer.get("budget_spent"):
        output.say("the budget ended before every item was asked; run it again to go on")


def _told(row: dict[str, Any]) -> str:
    low, high = row["interval"]
    counts = f"{row['wins']} wins, {row['losses']} losses, {row['ties']} ties"
    return f"{row['release']} against {row['against']}: {row['mean']:+.3f} [{low:+.3f}, {high:+.3f}], {counts}: {row['result']}"


def _trend(last: dict[str, Any]) -> str:
    verdict = {"better": "evolution helped", "worse": "evolution hurt"}.get(last["result"], "not shown to have helped")
    return f"since {last['against']}: {verdict} ({last['mean']:+.3f})"
