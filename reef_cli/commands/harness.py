"""`reef harness`: the tree around a model, and the agents installed with it on this machine.

A tree is read from the server (`tree`, `pull`, `diff`), edited as a folder, and sent back as mutations (`propose`). `install`
runs the very script that `curl … | bash` would; what is installed lies in the user's data folder, or below `--prefix`.
"""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from reef_cli.commands import harness_history, output
from reef_cli.commands.shell import Scenario, Shell, Yes, confirm, items, new_app, with_shell
from reef_cli.core.errors import InstallFailed, InvalidRequest, NotFoundError, ReefError, UsageError
from reef_cli.harness import discovery, install, scaffold
from reef_cli.harness.install import Installation
from reef_cli.harness.tree import Entry, Tree, parse_entry

app = new_app("Install agents with a scenario's harness, read it and propose changes")

AdapterName = Annotated[str | None, typer.Argument(metavar="[ADAPTER]", help="Agent  [default: the only one installed]")]
OneScenario = Annotated[str | None, typer.Option("--scenario", "-s", envvar="REEF_SCENARIO", help="Scenario  [default: any]")]
Prefix = Annotated[Path | None, typer.Option("--prefix", help="Install below this folder  [default: the user's own folders]")]
Found = Annotated[Path | None, typer.Option("--prefix", help="Where it was installed  [default: the user's own folders]")]
OfRelease = Annotated[str | None, typer.Option("--release", help="Release  [default: the one in force]")]
Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of a pulled tree")]
Row = dict[str, Any]


# -- agents on this machine -------------------------------------------------------------------------------------------


@app.command("install")
@with_shell()
def install_agent(
    shell: Shell,
    adapter: Annotated[str, typer.Option("--adapter", "-a", help="Agent, or agent@version; see: reef harness adapters")],
    release: OfRelease = None,
    scenario: Scenario = "default",
    prefix: Prefix = None,
) -> None:
    """Install an agent with a scenario's harness"""
    name, version = discovery.split(adapter)
    chosen = discovery.adapter(name)
    manifest = _manifest(shell, scenario, release)
    names = ("release_id", "content_id", "step", "changed", "needs_nothing")
    facts = install.ReleaseFacts(scenario, *(manifest[name] for name in names))
    target = install.Target(shell.client.url, str(manifest.get("model") or "default"), version)
    payload = install.payload(chosen, Tree.of(manifest["entries"]), facts, target)
    environment = _environment(prefix)
    if token := shell.token():
        environment["REEF_TOKEN"] = token
    said = install.local_install(payload, environment)
    item = _pick(environment, name, scenario)
    shell.emit(_facts(item), lambda: output.block(said.rstrip()))
    shell.hint(item.wrapper)


@app.command("list")
@with_shell(local=True)
def list_installed(shell: Shell, prefix: Found = None) -> None:
    """List what is installed on this machine"""
    rows = [_facts(item) for item in install.installed(_environment(prefix))]
    columns = ("adapter", "scenario", "release_id", "version", "gateway", "wrapper")
    shell.emit({"installed": rows}, lambda: output.table(columns, [[row[name] for name in columns] for row in rows]))
    if not rows:
        shell.hint("reef harness install --adapter NAME")


@app.command()
@with_shell(local=True)
def update(
    shell: Shell, adapter: AdapterName = None, scenario: OneScenario = None, release: OfRelease = None, prefix: Found = None
) -> None:
    """Bring an installed agent to the release in force, or to a named one"""
    environment = _environment(prefix)
    before = _pick(environment, adapter, scenario)
    said = _run(before, environment, "update", *(["--release", release] if release else []))
    after = _pick(environment, before.adapter, before.scenario)
    facts = {**_facts(after), "previous_release_id": before.release_id}
    shell.emit(facts, lambda: output.block(said))


@app.command()
@with_shell(local=True)
def uninstall(
    shell: Shell, adapter: AdapterName = None, scenario: OneScenario = None, prefix: Found = None, yes: Yes = False
) -> None:
    """Remove an installed agent with everything that was made for it"""
    environment = _environment(prefix)
    item = _pick(environment, adapter, scenario)
    confirm(
        f"Remove {item.adapter} of {item.scenario}, with its settings and the runs not reported yet?", yes=yes, required=True
    )
    said = _run(item, environment, "uninstall")
    shell.emit({**_facts(item), "removed": True}, lambda: output.block(said))


@app.command()
@with_shell(local=True)
def doctor(shell: Shell, adapter: AdapterName = None, scenario: OneScenario = None, prefix: Found = None) -> int:
    """Check an installed agent; exits 1 when something is wrong"""
    environment = _environment(prefix)
    item = _pick(environment, adapter, scenario)
    done = install.run_client(item, "doctor", "--json", environment=environment)
    try:
        checks: list[Row] = json.loads(done.stdout)
    except ValueError:
        raise _failed(item, "doctor", done.stderr, done.returncode) from None
    rows = [["ok" if check["ok"] else "FAIL", check["check"], check["detail"]] for check in checks]
    sound = all(check["ok"] for check in checks)
    shell.emit({**_facts(item), "ok": sound, "checks": checks}, lambda: output.table(("", "check", "detail"), rows))
    return 0 if sound else ReefError.exit_code


# -- trees ------------------------------------------------------------------------------------------------------------


@app.command()
@with_shell()
def tree(shell: Shell, scenario: Scenario = "default", release: OfRelease = None) -> None:
    """Show the tree of a scenario's harness"""
    manifest = _manifest(shell, scenario, release)
    shell.emit(manifest, lambda: _draw_tree(manifest))
    shell.hint(f"reef harness pull FOLDER -s {scenario}")


@app.command()
@with_shell()
def pull(
    shell: Shell,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder to make")],
    scenario: Scenario = "default",
    release: OfRelease = None,
) -> None:
    """Write a tree as a folder, to read or to edit"""
    manifest = _manifest(shell, scenario, release)
    made = install.pull(manifest["entries"], folder)
    facts = {"scenario": scenario, "release_id": manifest["release_id"], "folder": str(folder), "entries": len(made)}
    shell.emit(facts, lambda: output.pairs(facts.items()))
    base = f" --base {manifest['release_id']}" if manifest["release_id"] else ""
    shell.hint(f"edit it, then: reef harness propose {folder} -s {scenario}{base}")


@app.command()
@with_shell()
def diff(shell: Shell, folder: Folder, scenario: Scenario = "default", release: OfRelease = None) -> None:
    """Compare a folder with a release of the harness"""
    manifest = _manifest(shell, scenario, release)
    mutations = [mutation.wire() for mutation in install.compare(manifest["entries"], _existing(folder))]
    facts = {"scenario": scenario, "release_id": manifest["release_id"], "mutations": mutations}
    shell.emit(facts, lambda: output.table(("change", "entry", "kind"), [_mutation_row(item) for item in mutations]))
    if not mutations:
        shell.say("no difference")


@app.command()
@with_shell()
def propose(
    shell: Shell,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Edited folder, or JSON with mutations; - reads stdin")],
    scenario: Scenario = "default",
    base: Annotated[str | None, typer.Option("--base", help="Release the edit started from; folders need it")] = None,
    reason: Annotated[str | None, typer.Option("--reason", "-m", help="Why, for whoever reads the release")] = None,
    unjudged: Annotated[bool, typer.Option("--unjudged", help="Release without measuring, where a recipe would judge")] = False,
) -> None:
    """Propose a change of the harness: it becomes a release, or waits to be judged or reviewed"""
    body = _folder_body(shell, scenario, file, base) if file.is_dir() else _file_body(file)
    if base is not None:
        body["base_release_id"] = base
    if reason is not None:
        body["reason"] = reason
    if unjudged:
        body["judged"] = False
    answer = shell.client.request("POST", "/reef/harness/proposals", body, headers={"x-reef-scenario": scenario}).json
    if "release_id" not in answer:
        shell.emit(answer, lambda: print(f"{answer['agent_record_id']} waits to be judged: {answer.get('changed', '')}"))
        shell.hint(f"reef jobs list -s {scenario}")
        return
    state = "held for review" if answer.get("pending") else "released"
    shell.emit(answer, lambda: print(f"{answer['release_id']} {state}: {answer.get('changed', '')}"))
    if answer.get("pending"):
        shell.hint(f"reef release promote {answer['release_id']} -s {scenario}")


app.command("history")(harness_history.history)


# -- adapters ---------------------------------------------------------------------------------------------------------


@app.command()
@with_shell(local=True)
def adapters(shell: Shell) -> None:
    """List the agents that can be installed"""
    rows = [adapter.summary() for _, adapter in sorted(discovery.adapters().items())]
    columns = ("adapter", "agent", "speaks", "versions", "takes")
    cells = [[r["name"], r["title"], r["dialect"], ", ".join(r["versions"]), ", ".join(r["kinds"])] for r in rows]
    shell.emit({"adapters": rows}, lambda: output.table(columns, cells))
    shell.hint("reef harness install --adapter NAME")


@app.command("new-adapter")
@with_shell(local=True)
def new_adapter(
    shell: Shell,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Lower-case words joined by hyphens")],
    parent: Annotated[Path, typer.Option("--in", help="Folder to make it in")] = Path("adapters"),
) -> None:
    """Make the folder of a new adapter, to be filled in"""
    made = scaffold.new_adapter(name, parent)
    facts = {**made.summary(), "folder": str(made.folder)}
    shell.emit(facts, lambda: print(made.folder))
    shell.hint(f"edit it, then: {discovery.VARIABLE}={made.folder} reef harness adapters")


# -- parts ------------------------------------------------------------------------------------------------------------


def _manifest(shell: Shell, scenario: str, release: str | None) -> Row:
    from reef_cli.control.client import with_query

    path = with_query("/reef/harness", {"release_id": release})
    found = shell.client.request("GET", path, headers={"x-reef-scenario": scenario}).json
    return dict(found)


def _environment(prefix: Path | None) -> dict[str, str]:
    """This process's environment, pointed at a prefix when one is given."""
    environment = dict(os.environ)
    if prefix is not None:
        root = prefix.expanduser().absolute()
        environment |= {"REEF_HARNESS_HOME": str(root / "share" / "reef-harness"), "REEF_BIN_DIR": str(root / "bin")}
    return environment


def _pick(environment: Mapping[str, str], adapter: str | None, scenario: str | None) -> Installation:
    """The one installation that fits. `NotFoundError` for none, `UsageError` when several do."""
    every = install.installed(environment)
    fits = [item for item in every if adapter in (None, item.adapter) and scenario in (None, item.scenario)]
    known = ", ".join(f"{item.adapter} of {item.scenario}" for item in every) or "nothing"
    if not fits:
        what = " of ".join(filter(None, (adapter or "no agent", scenario)))
        raise NotFoundError(f"{what} is not installed here" if adapter else f"{what} is installed here", why=f"found: {known}")
    if len(fits) > 1:
        raise UsageError("several agents are installed", why=known, hint="name one: ADAPTER --scenario SCENARIO")
    return fits[0]


def _run(item: Installation, environment: Mapping[str, str], *words: str) -> str:
    """A command of the agent's wrapper; what it said. Raises `InstallFailed`."""
    done = install.run_client(item, *words, environment=environment)
    if done.returncode != 0:
        raise _failed(item, words[0], done.stderr, done.returncode)
    return done.stderr.strip()


def _failed(item: Installation, command: str, said: str, status: int) -> InstallFailed:
    lines = said.strip().removeprefix("reef: ").splitlines() or ["it said nothing"]
    return InstallFailed(
        f"{Path(item.wrapper).name} {command} failed: {lines[0]}",
        why="; ".join(line.strip() for line in lines[1:4]),
        hint=f"reef harness doctor {item.adapter} --scenario {item.scenario}" if command != "doctor" else "install it again",
        status=status,
    )


def _facts(item: Installation) -> Row:
    return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(item).items()}


def _existing(folder: Path) -> Path:
    if not folder.is_dir():
        raise NotFoundError(f"{folder} is no folder", hint="make one: reef harness pull FOLDER")
    return folder


def _folder_body(shell: Shell, scenario: str, folder: Path, base: str | None) -> Row:
    """The mutations of an edited folder. Against the wrong release they would undo what came since, so it must be named."""
    manifest = _manifest(shell, scenario, base)
    if base is None and manifest["release_id"] is not None:
        raise UsageError(
            "a folder does not say which release it started from",
            why="against a newer one it would take back what changed since",
            hint="--base RELEASE, as `reef harness pull` said; see: reef harness tree",
        )
    return {"mutations": [mutation.wire() for mutation in install.compare(manifest["entries"], folder)]}


def _file_body(file: Path) -> Row:
    """`{mutations, base_release_id?, reason?}` or the mutations alone."""
    try:
        raw = json.loads(sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {file}", why=error.strerror or str(error)) from error
    except ValueError as error:
        raise InvalidRequest(f"{file} is not JSON", why=str(error), hint="see docs/harness.md") from error
    return dict(raw) if isinstance(raw, dict) and "mutations" in raw else {"mutations": raw}


def _mutation_row(mutation: Row) -> list[object]:
    return [mutation["op"], mutation["id"], (mutation.get("entry") or {}).get("kind")]


def _draw_tree(manifest: Row) -> None:
    names = ("scenario", "release_id", "step", "changed")
    output.pairs((name, manifest.get(name)) for name in names if manifest.get(name) not in (None, ""))
    entries = [parse_entry(entry) for entry in items(manifest, "entries")]
    output.table(("entry", "kind", "holds"), [[entry.id, entry.kind, _gist(entry)] for entry in entries])


def _gist(entry: Entry) -> str:
    """The first line of an entry's text, else its settings."""
    return next(iter(entry.text.strip().splitlines()), json.dumps(dict(entry.config), sort_keys=True))
