"""`reef discover`: search for one best solution of a hard problem with the served model, learning from every step."""

import hashlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reef_cli.commands import output
from reef_cli.commands.discover_show import Show
from reef_cli.commands.shell import Shell, items, new_app, scenario_path, with_shell
from reef_cli.core.errors import UsageError

if TYPE_CHECKING:
    from reef_cli.discovery.archive import Archive
    from reef_cli.discovery.desk import Desk
    from reef_cli.discovery.problem import Problem, Space
    from reef_cli.discovery.run import Plan

app = new_app()

Problems = Annotated[str, typer.Argument(metavar="PROBLEM", help="packing-26, packing-32, or module:Class")]
RunName = Annotated[str | None, typer.Option("--run", help="Name of the run, to go on with it  [default: the problem's]")]
SpaceName = Annotated[str, typer.Option("--space", help="lines, walks or programs; or one of them after guidance-")]


@app.command()
@with_shell()
def discover(
    shell: Shell,
    problem: Problems,
    steps: Annotated[int, typer.Option("--steps", "-n", min=0, help="Steps to run now; 0 only shows and exports")] = 20,
    run: RunName = None,
    scenario: Annotated[str | None, typer.Option("--scenario", "-s", help="Scenario  [default: the run's name]")] = None,
    space: SpaceName = "lines",
    groups: Annotated[int | None, typer.Option("--groups", min=1, help="Parents per step  [default: the recipe's]")] = None,
    rollouts: Annotated[int | None, typer.Option("--rollouts", min=1, help="Tries per parent  [default: the recipe's]")] = None,
    frozen: Annotated[bool, typer.Option("--frozen", help="Report scores, but train nothing")] = False,
    initial_only: Annotated[bool, typer.Option("--initial-only", help="Never build on what was found (best of N)")] = False,
    exploration: Annotated[float, typer.Option("--exploration", min=0.0, help="PUCT's weight of rarely tried parents")] = 1.0,
    tolerance: Annotated[float | None, typer.Option("--tolerance", min=0.0, help="Overlap the verifier lets pass")] = None,
    temperature: Annotated[float, typer.Option("--temperature", min=0.01, help="Sampling temperature")] = 1.0,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the search")] = 0,
    concurrency: Annotated[int, typer.Option("--concurrency", min=1, max=256, help="Tries under way at once")] = 16,
    executor_url: Annotated[
        str | None, typer.Option("--executor-url", help="Reef server of a guidance space's executor")
    ] = None,
    executor_token_file: Annotated[
        Path | None, typer.Option("--executor-token-file", help="File with that server's token; REEF_EXECUTOR_TOKEN works too")
    ] = None,
    adopt_head: Annotated[bool, typer.Option("--adopt-head", help="Go on although the head has moved since")] = False,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder of the results  [default: the run's own]")] = None,
) -> None:
    """Search for the best solution of a hard problem; Ctrl-C stops, the same command goes on"""
    from reef_cli.discovery import export, problems
    from reef_cli.discovery.archive import Archive

    task = problems.find(problem, {} if tolerance is None else {"tolerance": tolerance})
    name = _name(run or task.name)
    archive = Archive(shell.home.discovery / name / "archive.db")
    try:
        if steps:
            from reef_cli.discovery.run import Plan

            desk = _desk(shell, scenario or name, temperature)
            desk.open()
            grid = _grid(desk, groups, rollouts, frozen)
            plan = Plan(
                _bound(name, archive), *grid, initial_only=initial_only, c=exploration, seed=seed, concurrency=concurrency
            )
            where = _space(shell, task, space, scenario or name, executor_url, executor_token_file)
            _search(shell, task, where, desk, archive, plan, steps, adopt_head)
        found = export.summary(task, archive)
        files = export.write(found, task, out or archive.path.parent)
    finally:
        archive.close()
    told = {"run": name, "files": {key: str(path) for key, path in files.items()}, **found}
    shell.emit(told, lambda: _draw(told))


def _name(text: str) -> str:
    if not text or not all(letter.isalnum() or letter in "-_." for letter in text) or text.startswith("."):
        raise UsageError(f"{text!r} is no name for a run", hint="letters, digits, - and _")
    return text


def _bound(name: str, archive: "Archive") -> str:
    """The run's name in reports: its own even when another archive of the same name was thrown away."""
    stamp = archive.stamp()
    return f"{name}-{hashlib.sha256(stamp.encode()).hexdigest()[:8]}"


def _desk(shell: Shell, scenario: str, temperature: float) -> "Desk":
    from reef_cli.discovery.desk import Desk

    return Desk(_connect(shell.client.url, shell.token()), scenario, temperature=temperature)


def _connect(url: str, token: str | None) -> Callable[[], Any]:
    from reef_cli.control.client import Client

    return lambda: Client(url, token, timeout_s=60.0)


def _executor_token(shell: Shell, url: str, file: Path | None) -> str | None:
    """The token of the executor's server; this server's own goes to no other address."""
    from reef_cli.control.discovery import first_token

    if file is not None:
        try:
            return first_token(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"cannot read {file}", why=str(error), hint="check --executor-token-file") from error
    own = shell.client.url == url.rstrip("/")
    return shell.environ.get("REEF_EXECUTOR_TOKEN") or (shell.token() if own else None)


def _grid(desk: "Desk", groups: int | None, rollouts: int | None, frozen: bool) -> tuple[int, int, bool]:
    """Groups, rollouts and whether to learn. A recipe that takes whole grids decides their size."""
    settings = desk.settings()
    if not frozen and "group_size" in settings:
        size = int(settings["group_size"])
        own = int(settings["batch_size"]) // size, size
        wanted = groups or own[0], rollouts or own[1]
        if wanted != own:
            raise UsageError(
                f"the recipe trains on grids of {own[0]} x {own[1]}, not {wanted[0]} x {wanted[1]}",
                hint="set reef.batch_size and reef.group_size of the server, or search with --frozen",
            )
        return (*own, True)
    if not frozen and settings:
        raise UsageError(
            f"the server's recipe {settings['recipe']} does not learn from grids",
            hint="serve recipes.tttd.recipe:TTTDRecipe, or search with --frozen",
        )
    return groups or 4, rollouts or 8, False


def _space(
    shell: Shell, task: "Problem", name: str, scenario: str, executor_url: str | None, token_file: Path | None
) -> "Space":
    kind, _, inner = name.partition("-")
    if kind != "guidance":
        return task.space(name)
    from reef_cli.discovery.desk import Desk
    from reef_cli.discovery.guidance import GuidanceSpace

    if executor_url is not None:
        executor = Desk(_connect(executor_url, _executor_token(shell, executor_url, token_file)), "default")
    else:
        releases = items(shell.client.get(scenario_path(scenario, "releases")), "releases")
        first = min(releases, key=lambda row: int(row["step"]))
        executor = Desk(_connect(shell.client.url, shell.token()), scenario, pin=str(first["release_id"]))
    return GuidanceSpace(
        task.space(inner), lambda ask, seed: executor.propose(ask, seed).text, task.statement.partition("\n")[0]
    )


def _search(
    shell: Shell, task: "Problem", space: "Space", desk: "Desk", archive: "Archive", plan: "Plan", steps: int, adopt: bool
) -> None:
    """Run the steps; Ctrl-C ends the tries under way and keeps them."""
    from reef_cli.discovery.run import Run

    show = Show(quiet=shell.json, steps=steps)
    run = Run(task, space, desk, archive, plan, show.progress)
    try:
        run.begin(adopt_head=adopt)
        for _ in range(steps):
            show.step(run.step(), archive.history())
    except KeyboardInterrupt:
        with suppress(KeyboardInterrupt):
            run.stop()
        show.close()
        shell.say("stopped; everything found so far is kept, the same command goes on")
        raise
    finally:
        show.close()


def _draw(told: dict[str, Any]) -> None:
    from reef_cli.discovery import pictures

    print(pictures.chart([float(row["best"]) for row in told["history"]]))
    print()
    facts = [(name, told[name]) for name in ("run", "problem", "valid", "steps", "tries", "valid_tries", "text")]
    output.pairs([("strict", repr(told["strict"])), ("value", repr(told["value"])), *facts, *told["files"].items()])
