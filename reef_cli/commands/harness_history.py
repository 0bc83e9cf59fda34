"""`reef harness history`: the releases of a harness as a git repository of one's own."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from reef_cli.commands.chain import chains_of
from reef_cli.commands.shell import Scenario, Shell, with_shell
from reef_cli.core.types import Surface


@with_shell()
def history(
    shell: Shell,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Repository to make, or to go on with")],
    scenario: Scenario = "default",
) -> None:
    """Write a harness's releases as a git repository, a commit each; run again it adds the new ones"""
    from reef_cli.control.client import with_query
    from reef_cli.harness import history as repository

    def entries_of(release: str) -> Any:
        path = with_query("/reef/harness", {"release_id": release})
        return shell.client.request("GET", path, headers={"x-reef-scenario": scenario}).json["entries"]

    rows = sorted(filter(_of_harness, chains_of(shell).releases(scenario)), key=lambda row: int(row["step"]))
    written = repository.write(folder, rows, entries_of)
    facts = {"scenario": scenario, "folder": str(folder), "written": written, "releases": len(rows)}
    shell.emit(facts, lambda: print(f"{len(written)} of {len(rows)} releases are new in {folder}"))
    shell.hint(f"git -C {folder} log --stat, or git -C {folder} blame FILE")


def _of_harness(row: Mapping[str, Any]) -> bool:
    return row["surface"] == Surface.HARNESS and not row.get("pending")
