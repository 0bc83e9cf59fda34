"""`reef release`: the chain of a scenario, with and without a running server.

Promote and rollback read the head first and send it along, so that a person moves the head they saw: when another move came
in between, the command exits 4 and names the head that stands there now.
"""

import time
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer

from reef_cli.commands import output
from reef_cli.commands.chain import (
    Chains,
    Row,
    chains_of,
    current,
    find,
    local_only,
    meant,
    plain_data,
    rollback_target,
    service_of,
)
from reef_cli.commands.evidence import draw_diff, draw_evidence
from reef_cli.commands.shell import DryRun, Scenario, Shell, Yes, confirm, new_app, with_shell
from reef_cli.core.errors import ConflictError, NotRestorable, ReefError
from reef_cli.core.types import Surface

app = new_app("List, compare, verify, promote and roll back releases")

Release = Annotated[str, typer.Argument(metavar="RELEASE", help="Release id, or a prefix of it")]
ExpectedHead = Annotated[
    str | None, typer.Option("--expected-head", help="Move only if this release is the head  [default: the one seen]")
]


@app.command("list")
@with_shell()
def list_releases(
    shell: Shell,
    scenario: Scenario = "default",
    all_scenarios: Annotated[bool, typer.Option("--all", help="Of every scenario")] = False,
    limit: Annotated[int | None, typer.Option("--limit", "-n", min=1, help="At most this many of each")] = None,
) -> None:
    """List releases, newest first; * is in force, ? waits for a person"""
    chains = chains_of(shell)
    names = chains.scenarios() if all_scenarios else [scenario]
    found = [{**row, "scenario": name} for name in names for row in chains.releases(name)[:limit]]
    columns = ("", "release", "scenario", "surface", "operation", "age", "gated", "evidence")
    shell.emit({"releases": found}, lambda: output.table(columns, map(_row, found)))
    if held := [row for row in found if row.get("pending")]:
        shell.hint(f"reef release promote {held[0]['release_id']} -s {held[0]['scenario']}")


@app.command()
@with_shell()
def show(shell: Shell, release_id: Release, scenario: Scenario = "default") -> None:
    """Show one release with its evidence"""
    row = find(chains_of(shell).releases(scenario), scenario, release_id)
    shell.emit(row, lambda: _draw(row))


@app.command()
@with_shell()
def log(shell: Shell, scenario: Scenario = "default") -> None:
    """Tell the story of a chain: who released what on which evidence"""
    rows = chains_of(shell).releases(scenario)
    shell.emit({"scenario": scenario, "releases": rows}, lambda: _each(_tell, rows))


@app.command()
@with_shell()
def diff(
    shell: Shell,
    a: Release,
    b: Annotated[str | None, typer.Argument(metavar="[OTHER]", help="Release to compare with  [default: the head]")] = None,
    scenario: Scenario = "default",
) -> None:
    """Compare two releases"""
    chains = chains_of(shell)
    rows = chains.releases(scenario)
    left = find(rows, scenario, a)
    right = find(rows, scenario, b) if b else current(rows, scenario, Surface(left["surface"]))
    answer = chains.diff(scenario, str(left["release_id"]), str(right["release_id"]))
    shell.emit(answer, lambda: draw_diff(answer))


@app.command()
@with_shell()
def review(
    shell: Shell,
    scenario: Annotated[str | None, typer.Option("--scenario", "-s", help="Scenario  [default: all]")] = None,
) -> None:
    """Go through what waits for a person: evidence, diff, answers side by side; promote, dismiss or leave each"""
    from reef_cli.commands.review import run

    run(shell, chains_of(shell), scenario)


@app.command()
@with_shell()
def verify(shell: Shell, scenario: Scenario = "default") -> int:
    """Check a chain and its content byte by byte; exits 1 when something is wrong"""
    local_only(shell, "verify")
    problems = [plain_data(problem) for problem in service_of(shell).verify(scenario)]
    rows = [list(problem.values()) if isinstance(problem, dict) else [problem] for problem in problems]
    columns = tuple(problems[0]) if problems and isinstance(problems[0], dict) else ("problem",)
    data = {"scenario": scenario, "ok": not problems, "problems": problems}
    shell.emit(data, lambda: output.table(columns, rows) if problems else print(f"{scenario}: sound"))
    return ReefError.exit_code if problems else 0


@app.command()
@with_shell()
def promote(
    shell: Shell,
    release_id: Release,
    scenario: Scenario = "default",
    expected_head: ExpectedHead = None,
    yes: Yes = False,
    dry_run: DryRun = False,
) -> None:
    """Serve a held release"""
    chains = chains_of(shell)
    rows = chains.releases(scenario)
    target = find(rows, scenario, release_id)
    _move(shell, chains, scenario, "promote", Surface(target["surface"]), rows, target, expected_head, yes=yes, dry_run=dry_run)


@app.command()
@with_shell()
def rollback(
    shell: Shell,
    release_id: Annotated[
        str | None, typer.Argument(metavar="[RELEASE]", help="Release whose content to serve  [default: the previous content]")
    ] = None,
    scenario: Scenario = "default",
    surface: Annotated[
        Surface | None, typer.Option("--surface", help="weights or harness  [default: the release's, or the only one there is]")
    ] = None,
    expected_head: ExpectedHead = None,
    yes: Yes = False,
    dry_run: DryRun = False,
) -> None:
    """Serve an earlier release's content again, as a new release"""
    chains = chains_of(shell)
    rows = chains.releases(scenario)
    named = find(rows, scenario, release_id) if release_id else None
    chosen = meant(rows, surface, named, expected_head)
    target = named or rollback_target(rows, chosen)
    if target is None:
        head = current(rows, scenario, chosen)
        raise NotRestorable(f"{scenario} has no earlier content", why=f"its head {head['release_id']} is all it ever served")
    _move(shell, chains, scenario, "rollback", chosen, rows, target, expected_head, yes=yes, dry_run=dry_run)


@app.command()
@with_shell()
def gc(shell: Shell, yes: Yes = False, dry_run: DryRun = False) -> None:
    """Delete content that no release needs any more, and keep older checkpoints as differences"""
    local_only(shell, "gc")
    service = service_of(shell)
    plan = plain_data(service.gc(dry_run=True))
    if not dry_run:
        shell.say("would delete:")
        if not shell.json:
            _draw_any(plan)
        confirm("Delete it?", yes=yes, required=True)
        plan = plain_data(service.gc(dry_run=False))
        # What stays may still become smaller: older checkpoints as differences, each restorable byte for byte.
        plan |= {"compacted": plain_data(service.compact())}
    shell.emit({"dry_run": dry_run, "report": plan}, lambda: _draw_any(plan))


Remote = Annotated[str, typer.Argument(metavar="REMOTE", help="Address or folder of a git repository")]
OneOf = Annotated[str | None, typer.Option("--scenario", "-s", help="Scenario  [default: all]")]


@app.command()
@with_shell()
def push(shell: Shell, remote: Remote, scenario: OneOf = None) -> None:
    """Send chains and their files to a git repository; refused when it has moved on"""
    local_only(shell, "push")
    _transferred(shell, "sent", plain_data(service_of(shell).push(remote, [scenario] if scenario else None)))


@app.command()
@with_shell()
def fetch(shell: Shell, remote: Remote, scenario: OneOf = None) -> None:
    """Take chains and their files from a git repository, only forward; a running server then serves their heads"""
    local_only(shell, "fetch")
    from reef_cli.releases.service import ReleaseService

    # A new machine has no repository yet; fetching into an empty home is how it gets one.
    service = ReleaseService(shell.home.prepare().root)
    _transferred(shell, "fetched", plain_data(service.fetch(remote, [scenario] if scenario else None)))


def _transferred(shell: Shell, what: str, moved: Row) -> None:
    names, size = ", ".join(moved["scenarios"]) or "no chain", output.size(moved["bytes"])
    shell.emit(moved, lambda: print(f"{what} {names}: {moved['objects']} large files, {size}"))


def _move(
    shell: Shell,
    chains: Chains,
    scenario: str,
    verb: str,
    surface: Surface,
    rows: list[Row],
    target: Row,
    expected: str | None,
    *,
    yes: bool,
    dry_run: bool,
) -> None:
    """Promote or roll back `target` over the head of its surface, after a look and a question."""
    seen, aim = str(current(rows, scenario, surface)["release_id"]), str(target["release_id"])
    facts = {"scenario": scenario, "operation": verb, "surface": str(surface)}
    plan = {**facts, "head": seen, "release_id": aim, "dry_run": dry_run}
    if dry_run:
        shell.emit({**plan, "applied": False}, lambda: print(f"would {verb} {scenario} from {seen} to the content of {aim}"))
        return
    confirm(f"{verb.capitalize()} {scenario} from {seen} to the content of {aim}?", yes=yes)
    try:
        if verb == "promote":
            released = chains.promote(scenario, aim, expected or seen)
        else:
            released = chains.rollback(scenario, aim, expected or seen, str(surface))
    except ConflictError as error:
        _name_head(error, chains, scenario, surface)
        raise
    shell.emit({**plan, "applied": True, "release": released}, lambda: print(f"{scenario} serves {released.get('release_id')}"))
    shell.hint(f"reef release list -s {scenario}")


def _name_head(error: ConflictError, chains: Chains, scenario: str, surface: Surface) -> None:
    """A conflict says which head stands there now, also when whoever raised it did not."""
    if not error.details.get("head"):
        error.details["head"] = current(chains.releases(scenario), scenario, surface)["release_id"]
    if str(error.details["head"]) not in error.message:
        error.message = f"{error.message}; the head is {error.details['head']}"
    error.hint = error.hint or f"look again: reef release list -s {scenario}"


def evidence_line(evidence: Any) -> str:
    """The numbers that matter of a release's evidence, in one line."""
    if not isinstance(evidence, dict):
        return str(evidence or "")
    reason = evidence.get("reason")
    numbers = [f"{name} {output.number(value)}" for name, value in evidence.items() if isinstance(value, float)]
    return "; ".join([str(reason)] if reason else numbers[:4])


def _row(row: Row) -> list[object]:
    mark = "*" if row.get("current") else "?" if row.get("pending") else ""
    gated = "yes" if row.get("gated") else "no"
    age = output.age(row.get("recorded_at"))
    what = (row.get("surface"), row.get("operation"))
    return [mark, row["release_id"], row.get("scenario"), *what, age, gated, evidence_line(row.get("evidence"))]


def _each(draw: Callable[[Row], None], rows: Iterable[Row]) -> None:
    for row in rows:
        draw(row)


def _tell(row: Row) -> None:
    state = " (in force)" if row.get("current") else " (held)" if row.get("pending") else ""
    at = _date(float(row.get("recorded_at") or 0))
    print(f"release {row['release_id']}{state}")
    output.pairs(
        [
            ("  what", f"{row.get('operation')} of {row.get('surface')} by {row.get('author', '?')}"),
            ("  when", at),
            ("  content", row.get("content_id")),
            ("  parent", row.get("parent_release_id")),
            ("  evidence", evidence_line(row.get("evidence")) or None),
        ]
    )
    print()


def _draw(row: Row) -> None:
    output.pairs((name, _fact(name, value)) for name, value in row.items() if name != "evidence" and value not in ("", None))
    print()
    draw_evidence(row.get("evidence"))
    print()


def _fact(name: str, value: object) -> object:
    """A fact of a release as a person reads it."""
    if name == "recorded_at" and isinstance(value, int | float):
        return f"{_date(value)}, {output.age(value)} ago"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else value


def _date(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def _draw_any(answer: Any) -> None:
    """Data of any shape: facts as lines, lists of rows as tables."""
    if not isinstance(answer, dict):
        output.block(answer)
        return
    for name, value in answer.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            output.table(tuple(value[0]), [list(row.values()) for row in value])
        elif isinstance(value, dict):
            output.pairs((f"{name}.{key}", item) for key, item in value.items())
        else:
            output.pairs([(name, value)])
