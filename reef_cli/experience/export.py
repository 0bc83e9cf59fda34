"""Experience in and out of files: JSON lines always, Parquet where pyarrow is installed; import resumes where it stopped.

A line is a record's document (`codec.to_document`) with its sequence, so an export imports back to the same records. Import
commits in batches and then writes how far it came beside the file; since stored records are recognised, a crash between the two
repeats a batch harmlessly.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, dataclass
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from reef_cli.core.errors import InvalidRequest, MissingDependency, ReefError
from reef_cli.experience import query
from reef_cli.experience.codec import Record, dumps, from_document, to_document
from reef_cli.experience.log import ExperienceLog

_PAGE = 200
_BATCH_RECORDS = 500
_BATCH_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Exported:
    """Records written, and records left out because their bodies were evicted."""

    records: int
    evicted: int


@dataclass(frozen=True, slots=True)
class Imported:
    """Lines read so far, records among them that were new, and how far into the file that is."""

    lines: int
    new: int
    offset: int
    size: int


def documents(log: ExperienceLog, scenario: str, after_sequence: int = 0) -> Iterator[dict[str, Any] | None]:
    """Every record of a scenario (by name or archive label) in order; None stands for an evicted one.

    Each page has its own snapshot: records never change, and a long export must not hold back the write-ahead log.
    """
    while True:
        with log.read() as connection:
            rows = query.page(connection, scenario, after_sequence, _PAGE, None, newest=False)
            for row in rows:
                record = None if row.evicted_at is not None else query.get(connection, scenario, row.id)
                yield None if record is None else {"sequence": row.sequence, "role": row.role, **to_document(record)}
        if len(rows) < _PAGE:
            return
        after_sequence = rows[-1].sequence


def export_jsonl(log: ExperienceLog, scenario: str, out: BinaryIO, after_sequence: int = 0) -> Exported:
    """Write one record per line. Raises `ScenarioNotFound`."""
    written = gone = 0
    for document in documents(log, scenario, after_sequence):
        if document is None:
            gone += 1
            continue
        out.write(dumps(document) + b"\n")
        written += 1
    return Exported(written, gone)


def export_parquet(log: ExperienceLog, scenario: str, path: Path, after_sequence: int = 0) -> Exported:
    """Write a Parquet file with token columns as lists and the whole document as JSON. Raises `MissingDependency`."""
    try:
        pyarrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError as error:
        raise MissingDependency("Parquet export needs pyarrow", hint="pip install pyarrow, or export JSON lines") from error
    ints, floats = pyarrow.list_(pyarrow.int32()), pyarrow.list_(pyarrow.float64())
    schema = pyarrow.schema(
        [
            *(("sequence", pyarrow.int64()), ("id", pyarrow.string()), ("kind", pyarrow.string())),
            *(("created_at", pyarrow.float64()), ("session", pyarrow.string()), ("release_id", pyarrow.string())),
            *(
                ("weight_version", pyarrow.string()),
                ("score", pyarrow.float64()),
                ("references", pyarrow.list_(pyarrow.string())),
            ),
            *(
                ("prompt_ids", ints),
                ("output_ids", ints),
                ("logprobs", floats),
                ("loss_mask", ints),
                ("document", pyarrow.string()),
            ),
        ]
    )
    written = gone = 0
    with parquet.ParquetWriter(path, schema) as writer:
        rows: list[dict[str, Any]] = []
        for document in documents(log, scenario, after_sequence):
            if document is None:
                gone += 1
                continue
            rows.append(_flat(document, schema.names))
            written += 1
            if len(rows) >= _PAGE:
                writer.write_table(pyarrow.Table.from_pylist(rows, schema=schema))
                rows = []
        writer.write_table(pyarrow.Table.from_pylist(rows, schema=schema))
    return Exported(written, gone)


def _flat(document: dict[str, Any], names: list[str]) -> dict[str, Any]:
    tokens = document.get("tokens") or {}
    flat = {name: document.get(name, tokens.get(name)) for name in names}
    flat["document"] = dumps(document).decode()
    return flat


async def import_jsonl(
    log: ExperienceLog, scenario: str, path: Path, on_progress: Callable[[Imported], None] | None = None
) -> Imported:
    """Store a file of JSON lines in `scenario`, batch by batch; goes on where an interrupted import of it stopped.

    Raises `InvalidRequest` (or what storing raises) naming the line; the batches before it are stored.
    """
    place, mark, state = await asyncio.to_thread(_begin, path, scenario)
    with contextlib.closing(_batches(path, scenario, state)) as batches:
        while (batch := await asyncio.to_thread(next, batches, None)) is not None:
            records, lines, offset = batch
            stored = await _store(log, records, state.lines, lines)
            state = Imported(state.lines + lines, state.new + sum(stored), offset, state.size)
            await asyncio.to_thread(_save, place, mark, state)
            if on_progress is not None:
                on_progress(state)
    await asyncio.to_thread(place.unlink, missing_ok=True)
    return state


def _begin(path: Path, scenario: str) -> tuple[Path, str, Imported]:
    """Where progress is kept, what it is progress of, and how far an earlier import came."""
    place = path.with_name(path.name + ".import")
    mark = _fingerprint(path, scenario)
    return place, mark, _resumed(place, mark) or Imported(0, 0, 0, path.stat().st_size)


async def _store(log: ExperienceLog, records: list[Record], before: int, lines: int) -> list[bool]:
    if not records:
        return []
    try:
        return await log.import_batch(records)
    except ReefError as error:
        raise _located(error, f"lines {before + 1} to {before + lines}") from error


def _batches(path: Path, scenario: str, state: Imported) -> Generator[tuple[list[Record], int, int], None, None]:
    """`(records, lines, offset after them)` until the end of the file."""
    records: list[Record] = []
    lines = 0
    offset = start = state.offset
    with path.open("rb") as source:
        source.seek(offset)
        for number, line in enumerate(source, state.lines + 1):
            lines, offset = lines + 1, offset + len(line)
            if line.strip():
                records.append(_record(line, scenario, number))
            if len(records) >= _BATCH_RECORDS or offset - start >= _BATCH_BYTES:
                yield records, lines, offset
                records, lines, start = [], 0, offset
    if lines:
        yield records, lines, offset


def _record(line: bytes, scenario: str, number: int) -> Record:
    try:
        return from_document(orjson.loads(line), scenario)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"line {number} is not JSON", why=str(error)) from error
    except ReefError as error:
        raise _located(error, f"line {number}") from error


def _located(error: ReefError, where: str) -> ReefError:
    """The same error, saying where in the file it is."""
    return type(error)(f"{where}: {error.message}", why=error.why, hint=error.hint, **error.details)


def _fingerprint(path: Path, scenario: str) -> str:
    """Recognises the file an interrupted import was of: its size, its beginning, and where it was to go."""
    with path.open("rb") as source:
        state = blake2b(source.read(1 << 16), digest_size=16)
    state.update(f"{path.stat().st_size} {scenario}".encode())
    return state.hexdigest()


def _resumed(place: Path, mark: str) -> Imported | None:
    try:
        saved = orjson.loads(place.read_bytes())
    except (FileNotFoundError, orjson.JSONDecodeError):
        return None
    return Imported(**saved["state"]) if saved.get("mark") == mark else None


def _save(place: Path, mark: str, state: Imported) -> None:
    draft = place.with_name(place.name + ".new")
    with draft.open("wb") as out:
        out.write(orjson.dumps({"mark": mark, "state": asdict(state)}))
        out.flush()
        os.fsync(out.fileno())
    draft.replace(place)
