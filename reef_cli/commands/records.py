"""`reef records`: the experience of a scenario, and moving it between servers as JSON lines."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Annotated, Any

import typer

from reef_cli.commands import output
from reef_cli.commands.shell import Scenario, Shell, items, new_app, scenario_path, with_shell
from reef_cli.control.plain import one_line
from reef_cli.core.errors import UsageError

app = new_app("List, show, export and import records")

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
    target: Annotated[Path, typer.Argument(metavar="FILE", help="JSON lines to write; - is stdout")],
    scenario: Scenario = "default",
    after: Annotated[int, typer.Option("--after", help="Only records after this sequence number")] = 0,
) -> None:
    """Write whole records as JSON lines, oldest first"""
    count = 0
    with _sink(target) as sink:
        for row in _pages(shell, scenario, after):
            record = shell.client.get(scenario_path(scenario, "records", record_id(row)))
            sink.write(json.dumps(record) + "\n")
            count += 1
    if str(target) != "-":
        shell.emit(
            {"scenario": scenario, "exported": count, "file": str(target)}, lambda: print(f"{count} records in {target}")
        )


@app.command("import")
@with_shell()
def import_records(
    shell: Shell,
    source: Annotated[Path, typer.Argument(metavar="FILE", help="JSON lines to read; - is stdin")],
    scenario: Scenario = "default",
) -> None:
    """Import records; inference before the reports that cite it; importing again changes nothing"""
    total = stored = 0
    headers = {"x-reef-scenario": scenario}
    for first, batch in _batches(source):
        try:
            answer = shell.client.request("POST", "/reef/records/batch", {"records": batch}, headers=headers)
        except UsageError as error:
            where = f"in the batch from line {first}; {total} lines before it were imported"
            error.why = f"{error.why}; {where}" if error.why else where
            raise
        total += len(batch)
        stored += int((answer.json or {}).get("stored") or 0)
    result = {"scenario": scenario, "received": total, "stored": stored}
    shell.emit(result, lambda: print(f"{stored} of {total} records were new"))


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


def _batches(source: Path) -> Iterator[tuple[int, list[Any]]]:
    """`(first line number, records)` in groups the API takes."""
    batch: list[Any] = []
    first, bulk = 1, 0
    with _source(source) as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            if batch and (len(batch) == _BATCH or bulk + len(line) > _BATCH_BYTES):
                yield first, batch
                batch, first, bulk = [], number, 0
            batch.append(_parsed(line, f"{source}:{number}"))
            bulk += len(line.encode())
    if batch:
        yield first, batch


def _parsed(line: str, place: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise UsageError(f"{place} is not JSON", why=str(error), hint="one JSON object a line") from error


def _sink(target: Path) -> IO[str]:
    if str(target) == "-":
        return open(sys.stdout.fileno(), "w", encoding="utf-8", closefd=False)
    try:
        return target.open("w", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {target}", why=error.strerror or str(error)) from error


def _source(source: Path) -> IO[str]:
    if str(source) == "-":
        return open(sys.stdin.fileno(), encoding="utf-8", closefd=False)
    try:
        return source.open(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read {source}", why=error.strerror or str(error)) from error


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
