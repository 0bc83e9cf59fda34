"""`docs/records.md`: the stored kinds, field by field, from the dataclasses; the tables, from the database itself."""

import sqlite3
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from docs_pages.markdown import code, table
from reef_cli.core.types import Inference, Report, TokenSpan, TokenTrace
from reef_cli.experience.model import Instruction, RecordRow
from reef_cli.experience.schema import MIGRATIONS, migrate

HEAD = """# Records

This page is generated from `reef_cli/core/types.py`, `reef_cli/experience/` and the database's schema by `scripts/docs.py`.

A scenario's experience is an ordered stream of records of three kinds. `GET /reef/scenarios/{scenario}/records/{record}`,
exports and the import routes all use the same JSON document: the field `kind` plus the fields below.
Times are seconds since 1970. An id is 1 to 200 printable characters; Reef's own are time-ordered (UUIDv7).

- `request` is the client's body, byte for byte: text when it is UTF-8, else `{"base64": ...}`.
- In an import, `created_at` may be left out (now), `messages` too (those of the request), and `response` (null).
- A record whose answer broke off has `complete: false` and an `error`; it never trains.
- `tokens` is null where the engine gives none (upstream); such a record never trains weights.
- Long conversations are stored as differences to earlier records of the session; what comes out is exact.
- Records are never changed. Retention drops bodies and keeps the light row with its content digest
  (see [operations](operations.md#retention)).
"""


def page() -> str:
    """The whole page."""
    documents = (("`inference`", Inference), ("`report`", Report), ("`train`", Instruction))
    parts = [HEAD, *(_document(title, owner) for title, owner in documents)]
    parts += [_document("Token trace (`tokens`)", TokenTrace), _document("Token span (`tokens.spans`)", TokenSpan)]
    parts.append(_document("Row of a page (`GET .../records`, `/reef/events`)", RecordRow))
    return "\n".join([*parts, _database()])


def _document(title: str, owner: type[Any]) -> str:
    hints: Mapping[str, Any] = get_type_hints(owner)
    rows = [(code(f.name), _type(hints[f.name]), "yes" if _required(f) else "") for f in fields(owner)]
    return f"## {title}\n\n{_prose(owner)}\n\n{table(('field', 'type', 'required'), rows)}\n"


def _required(field: Any) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _prose(owner: type[Any]) -> str:
    return "\n\n".join(" ".join(part.split()) for part in (owner.__doc__ or "").split("\n\n"))


_WORDS: Mapping[Any, str] = {
    str: "string",
    bytes: "string",
    int: "integer",
    float: "number",
    bool: "true or false",
    type(None): "null",
}


def _type(hint: Any) -> str:
    """A Python type in JSON's words."""
    if (base := getattr(hint, "__supertype__", hint)) in _WORDS:
        return _WORDS[base]
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(_type(part) for part in arguments)
    if origin is Literal:
        return "one of " + ", ".join(code(value) for value in arguments)
    if origin in (tuple, list, Sequence):
        return f"array ({_type(arguments[0])} each)"
    return "object" if origin is Mapping or is_dataclass(hint) or hint is Any else str(hint)


def _database() -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "experience.db"
        connection = sqlite3.connect(path, isolation_level=None)
        try:
            migrate(connection, path)
            query = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%' ORDER BY name"
            names = [row[0] for row in connection.execute(query)]
            rows = [(code(name), ", ".join(_columns(connection, name))) for name in names]
        finally:
            connection.close()
    done = ", ".join(code(migration.name) for migration in MIGRATIONS)
    intro = "`experience.db` is SQLite in write-ahead mode. Read it with any SQLite client; only `reef serve` may write it."
    return f"## Database\n\n{intro} Schema changes so far: {done}.\n\n{table(('table', 'columns'), rows)}\n"


def _columns(connection: sqlite3.Connection, name: str) -> list[str]:
    return [str(row[1]) for row in connection.execute(f"PRAGMA table_info({name})")]
