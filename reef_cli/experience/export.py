"""Records as files: JSON lines, or Parquet where pyarrow is installed. A line is a record's document as the API has it.

An interrupted import goes on where it stopped: how far it came stands beside the file. Knows nothing of the log, nor of HTTP.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

from reef_cli.core.errors import MissingDependency, UsageError

Add = Callable[[Mapping[str, Any]], None]
_GROUP = 200
"""Rows a Parquet file is written and read by at once."""


def is_parquet(path: Path) -> bool:
    return path.suffix == ".parquet"


def json_lines(out: TextIO) -> Add:
    """Writes one document a line."""

    def add(document: Mapping[str, Any]) -> None:
        out.write(json.dumps(document) + "\n")

    return add


@contextmanager
def parquet(path: Path) -> Iterator[Add]:
    """Writes a Parquet file: columns to select by, tokens as lists, and the whole document as JSON.

    The file appears when it is whole. Raises `MissingDependency`.
    """
    pyarrow, files = _pyarrow()
    schema = _schema(pyarrow)
    rows: list[dict[str, Any]] = []
    draft = path.with_name(path.name + ".part")
    try:
        with files.ParquetWriter(draft, schema) as writer:

            def flush() -> None:
                writer.write_table(pyarrow.Table.from_pylist(rows, schema=schema))
                rows.clear()

            def add(document: Mapping[str, Any]) -> None:
                rows.append(_flat(document, schema.names))
                if len(rows) >= _GROUP:
                    flush()

            yield add
            flush()
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _pyarrow() -> tuple[Any, Any]:
    try:
        return import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError as error:
        raise MissingDependency(
            "Parquet files need pyarrow", hint="pip install 'reef-cli[parquet]', or use JSON lines"
        ) from error


def _schema(pyarrow: Any) -> Any:
    text, number, ids = pyarrow.string(), pyarrow.float64(), pyarrow.list_(pyarrow.int32())
    kinds = {
        pyarrow.int64(): ("sequence",),
        text: ("id", "kind", "session", "model", "release_id", "weight_version", "document"),
        number: ("created_at", "score"),
        ids: ("prompt_ids", "output_ids", "loss_mask"),
        pyarrow.list_(number): ("logprobs",),
        pyarrow.list_(text): ("references",),
    }
    return pyarrow.schema([(name, kind) for kind, names in kinds.items() for name in names])


def _flat(document: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    tokens = document.get("tokens") or {}
    row = {name: document.get(name, tokens.get(name)) for name in names}
    if row["logprobs"] is not None:
        row["logprobs"] = [float(value) for value in row["logprobs"]]  # infinities are spelled out in JSON
    return row | {"document": json.dumps(document)}


def read(path: Path, after: int = 0) -> Iterator[tuple[int, Any]]:
    """`(line number, document)` of a file's lines after the first `after`. `UsageError` names a line that is not JSON."""
    if is_parquet(path):
        yield from _parsed(_documents(path), str(path), after)
    else:
        with path.open(encoding="utf-8") as source:
            yield from _parsed(source, str(path), after)


def read_lines(source: TextIO, name: str) -> Iterator[tuple[int, Any]]:
    """The same of lines from a pipe."""
    return _parsed(source, name, 0)


def _documents(path: Path) -> Iterator[str]:
    pyarrow, files = _pyarrow()
    try:
        for batch in files.ParquetFile(path).iter_batches(_GROUP, columns=["document"]):
            yield from batch.column("document").to_pylist()
    except (pyarrow.ArrowInvalid, KeyError) as error:
        raise UsageError(
            f"{path} is no Parquet file of records", why=str(error), hint="reef records export wrote one"
        ) from error


def _parsed(lines: Iterator[str] | TextIO, name: str, after: int) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(lines, 1):
        if number <= after or not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except ValueError as error:
            raise UsageError(f"{name}:{number} is not JSON", why=str(error), hint="one JSON object a line") from error


@dataclass(frozen=True, slots=True)
class Progress:
    """Lines that are stored, and records among them that were new."""

    lines: int = 0
    stored: int = 0


class Bookmark:
    """How far the import of a file into one place came; kept beside the file until it is done."""

    def __init__(self, file: Path, into: str) -> None:
        self._mark = _fingerprint(file, into)
        self._path = file.with_name(file.name + ".import")

    def load(self) -> Progress:
        """Where to go on; the beginning when the file or the place is another."""
        try:
            saved = json.loads(self._path.read_bytes())
        except (OSError, ValueError):
            return Progress()
        return Progress(**saved["progress"]) if isinstance(saved, dict) and saved.get("mark") == self._mark else Progress()

    def save(self, progress: Progress) -> None:
        draft = self._path.with_name(self._path.name + ".new")
        with draft.open("w", encoding="utf-8") as out:
            json.dump({"mark": self._mark, "progress": asdict(progress)}, out)
            out.flush()
            os.fsync(out.fileno())
        draft.replace(self._path)

    def done(self) -> None:
        self._path.unlink(missing_ok=True)


def _fingerprint(file: Path, into: str) -> str:
    """Recognises a file and where it goes: its size, its beginning, and the place's name."""
    with file.open("rb") as source:
        state = blake2b(source.read(1 << 16), digest_size=16)
    state.update(f"{file.stat().st_size} {into}".encode())
    return state.hexdigest()
