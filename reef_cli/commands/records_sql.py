"""`reef records query` and `reef records tables`: SQL over a home's experience, whether its server runs or not."""

import csv
import sys
from typing import Annotated, Any

import typer

from reef_cli.commands import output
from reef_cli.commands.shell import Shell, with_shell


@with_shell(local=True)
def query(
    shell: Shell,
    statement: Annotated[str, typer.Argument(metavar="SQL", help="One SELECT")],
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="At most this many rows")] = 1000,
    as_csv: Annotated[bool, typer.Option("--csv", help="Comma-separated, with a heading")] = False,
) -> None:
    """Ask the experience log in SQL, read-only"""
    from reef_cli.experience import sql

    answer = sql.query(shell.home.experience, statement, limit)
    if as_csv:
        writer = csv.writer(sys.stdout)
        writer.writerow(answer.columns)
        writer.writerows([_plain(cell) for cell in row] for row in answer.rows)
    else:
        rows = [dict(zip(answer.columns, map(_plain, row), strict=True)) for row in answer.rows]
        cells = [[_shown(cell) for cell in row] for row in answer.rows]
        shell.emit({"rows": rows, "more": answer.more}, lambda: output.table(answer.columns, cells))
    if answer.more:
        shell.hint(f"there are more than {limit} rows: --limit")


@with_shell(local=True)
def tables(shell: Shell) -> None:
    """List what `reef records query` can ask, with the columns"""
    from reef_cli.experience import sql

    found = sql.tables(shell.home.experience)
    rows = [(name, ", ".join(columns)) for name, columns in found.items()]
    shell.emit({"tables": found}, lambda: output.table(("table", "columns"), [*rows, ("document(sequence)", "JSON")]))
    shell.hint('reef records query "SELECT release_id, avg(score), count(*) FROM feedback GROUP BY 1"')


def _plain(cell: Any) -> Any:
    return cell.hex() if isinstance(cell, bytes) else cell


def _shown(cell: Any) -> Any:
    return output.number(cell) if isinstance(cell, float) and abs(cell) < 1e6 else _plain(cell)
