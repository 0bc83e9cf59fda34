"""`reef records`: the experience of a scenario, and moving it between servers as JSON lines or Parquet."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reef_cli.commands import output, records_sql
from reef_cli.commands.shell import Scenario, Shell, items, new_app, scenario_path, with_shell
from reef_cli.control.plain import one_line
from reef_cli.core.errors import NotFoundError, UsageError

if TYPE_CHECKING:
    from reef_cli.experience.export import Add

Line = tuple[int, Any]
"""A document and the number of its line."""

app = new_app("List, show, query, export and import records")
app.command("query")(records_sql.query)
app.command("tables")(records_sql.tables)

_PAGE = 500
_BATCH = 200
_BATCH_BYTES = 900 * 1024  # the server takes 1 MiB


@app.command("list")
@with_shell()
def list_records(
    shell: Shell,
    scenario: Scenario = "default",
    kind: Annotated[str | None, typer.Option("--kind", help="inference, report or train")] = None,
    after: Annotated[int | None, typer.Option("--after", help="Only records after this sequence number, oldest first")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=1000, help="At most this many")] = 20,
) -> None:
    """List records: the newest, or those after a sequence number"""
    order = "newest" if after is None else "oldest"
    path = scenario_path(scenario, "records")
    answer = shell.client.get(path, after_sequence=after, limit=limit, request_type=kind, order=order)
    rows = sorted(items(answer, "records"), key=lambda row: row.get("sequence") or 0)
    columns = ("seq", "receipt", "kind", "age", "release", "score", "text")
    shell.emit({"scenario": scenario, "records": rows}, lambda: output.table(columns, map(_row, rows)))
    if rows:
        shell.hint(f"reef records show {record_id(rows[-1])} -s {scenario}")


@app.command()
@with_shell()
def show(
    shell: Shell, record: Annotated[str, typer.Argument(metavar="RECEIPT", help="Record id")], scenario: Scenario = "default"
) -> None:
    """Show one record: conversation, answer, tokens, release"""
    answer = shell.client.get(scenario_path(scenario, "records", record))
    shell.emit(answer, lambda: _draw(answer))


@app.command("export")
@with_shell()
def export_records(
    shell: Shell,
    target: Annotated[Path, typer.Argument(metavar="FILE", help="JSON lines to write, or Parquet by .parquet; - is stdout")],
    scenario: Scenario = "default",
    after: Annotated[int, typer.Option("--after", help="Only records after this sequence number")] = 0,
) -> None:
    """Write whole records, oldest first, to a file"""
    count = evicted = 0
    with _sink(target) as add:
        for row in _pages(shell, scenario, after):
            record = _whole(shell, scenario, row)
            if record is None:
                evicted += 1
                continue
            add(record)
            count += 1
    if str(target) != "-":
        result = {"scenario": scenario, "exported": count, "evicted": evicted, "file": str(target)}
        gone = f", {evicted} more were evicted" if evicted else ""
        shell.emit(result, lambda: print(f"{count} records in {target}{gone}"))


@app.command("import")
@with_shell()
def import_records(
    shell: Shell,
    source: Annotated[Path, typer.Argument(metavar="FILE", help="JSON lines to read, or Parquet by .parquet; - is stdin")],
    scenario: Scenario = "default",
) -> None:
    """Import records, inference before reports that cite it; run again it changes nothing, or goes on where it stopped"""
    from reef_cli.experience.export import Bookmark, Progress

    with _reading(source):
        bookmark = None if str(source) == "-" else Bookmark(source, f"{shell.client.url} {scenario}")
        begun = bookmark.load() if bookmark else Progress()
        if begun.lines:
            shell.say(f"going on after line {begun.lines}")
        total, progress = 0, begun
        for batch in _batches(source, begun.lines):
            progress = Progress(batch[-1][0], progress.stored + _send(shell, scenario, batch, progress.lines))
            total += len(batch)
            if bookmark:
                bookmark.save(progress)
        if bookmark:
            bookmark.done()
    result = {"scenario": scenario, "received": total, "stored": progress.stored - begun.stored}
    shell.emit(result, lambda: print(f"{result['stored']} of {total} records were new"))


def record_id(row: dict[str, Any]) -> str:
    """The receipt in a row, whichever of the API's names it has."""
    return str(row.get("agent_record_id") or row.get("id") or "")


def _pages(shell: Shell, scenario: str, after: int) -> Iterator[dict[str, Any]]:
    cursor = after
    while True:
        rows = items(shell.client.get(scenario_path(scenario, "records"), after_sequence=cursor, limit=_PAGE), "records")
        yield from rows
        if len(rows) < _PAGE:
            return
        cursor = max(int(row["sequence"]) for row in rows)


def _whole(shell: Shell, scenario: str, row: dict[str, Any]) -> dict[str, Any] | None:
    """The record of a row, with its sequence; None when its bodies were evicted."""
    if row.get("evicted_at") is not None:
        return None
    try:
        record = shell.client.get(scenario_path(scenario, "records", record_id(row)))
    except NotFoundError:
        return None  # evicted since the page was read
    return {"sequence": row.get("sequence"), **record}


def _send(shell: Shell, scenario: str, batch: list[Line], before: int) -> int:
    """Store a batch; how many records of it were new."""
    body, headers = {"records": [document for _, document in batch]}, {"x-reef-scenario": scenario}
    try:
        answer = shell.client.request("POST", "/reef/records/batch", body, headers=headers)
    except UsageError as error:
        where = f"in the batch from line {batch[0][0]}; {before} lines before it are imported"
        error.why = f"{error.why}; {where}" if error.why else where
        raise
    return int((answer.json or {}).get("stored") or 0)


def _batches(source: Path, after: int) -> Iterator[list[Line]]:
    """Numbered documents in groups the API takes."""
    from reef_cli.experience import export

    if str(source) == "-":
        lines = export.read_lines(TextIOWrapper(sys.stdin.buffer, encoding="utf-8"), "-")
    else:
        lines = export.read(source, after)
    batch: list[Line] = []
    bulk = 0
    for number, document in lines:
        size = len(json.dumps(document))
        if batch and (len(batch) == _BATCH or bulk + size > _BATCH_BYTES):
            yield batch
            batch, bulk = [], 0
        batch.append((number, document))
        bulk += size
    if batch:
        yield batch


@contextmanager
def _reading(source: Path) -> Iterator[None]:
    """A file that cannot be read is the caller's mistake, not a failure."""
    try:
        yield
    except (FileNotFoundError, PermissionError, IsADirectoryError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {source}", why=getattr(error, "strerror", None) or str(error)) from error


@contextmanager
def _sink(target: Path) -> Iterator["Add"]:
    from reef_cli.experience import export

    try:
        if str(target) == "-":
            with open(sys.stdout.fileno(), "w", encoding="utf-8", closefd=False) as out:
                yield export.json_lines(out)
        elif export.is_parquet(target):
            with export.parquet(target) as add:
                yield add
        else:
            with target.open("w", encoding="utf-8") as out:
                yield export.json_lines(out)
    except OSError as error:
        raise UsageError(f"cannot write {target}", why=error.strerror or str(error)) from error


def _row(row: dict[str, Any]) -> list[object]:
    kind = row.get("request_type") or row.get("kind")
    text = row.get("error") or row.get("summary") or row.get("text") or row.get("feedback") or ""
    score = output.number(row.get("score"), 2)
    return [
        row.get("sequence"),
        record_id(row),
        kind,
        output.age(row.get("created_at")),
        row.get("release_id"),
        score,
        one_line(text, 80),
    ]


def _draw(record: dict[str, Any]) -> None:
    names = (
        "scenario",
        "request_type",
        "kind",
        "model",
        "dialect",
        "release_id",
        "weight_version",
        "session",
        "finish",
        "error",
        "score",
    )
    output.pairs([("receipt", record_id(record)), *((name, record.get(name)) for name in names)])
    for message in record.get("messages") or []:
        output.block(f"\n{message.get('role', '?')}: {_text(message.get('content'))}")
    response = record.get("response")
    if isinstance(response, dict):
        output.block(f"\nassistant (answer): {_text(response.get('content'))}")
        if response.get("tool_calls"):
            output.block(json.dumps(response["tool_calls"], indent=2))
    for name in ("feedback", "text", "references", "metadata"):
        if record.get(name):
            output.block(f"\n{name}: {_text(record[name])}")


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "" if content is None else json.dumps(content, ensure_ascii=False)
