"""The redaction hook: a deployment's function that rewrites a record before any byte of it is written.

The hook gets the record's document (`codec.to_document`, with the request body parsed when it is JSON) and returns it changed.
Identity and order are not its to change. When it rewrites what the tokens spell, the token trace goes too, since token ids
would give the text away; the record says so in its tag `redacted` and does not train.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import orjson

from reef_cli.core.errors import ReefError, StorageError
from reef_cli.core.types import Inference, Report
from reef_cli.experience.codec import Record, from_document, to_document
from reef_cli.experience.model import Instruction

Hook = Callable[[dict[str, Any]], dict[str, Any]]
TAG = "redacted"
_SPELLED = ("messages", "response", "raw_text")


def redact(hook: Hook, record: Record) -> Record:
    """The record as the hook wants it stored. Raises `StorageError` when the hook fails: nothing unredacted is written."""
    before = _parsed(to_document(record))
    try:
        after = hook(_parsed(to_document(record)))
        if not isinstance(after, Mapping):
            raise TypeError("it must return the document")
        changed = from_document(_restored(dict(after), before, record), record.scenario)
    # The hook is a deployment's own code: whatever it raises must stop this record, and only this record.
    except Exception as error:
        raise StorageError(
            "the redaction hook failed, so the record was not stored", why=_cause(error), hint="fix reef.redact"
        ) from error
    if type(changed) is not type(record):
        raise StorageError("the redaction hook changed the kind of a record", hint="fix reef.redact")
    changed = _same_identity(changed, record)
    if isinstance(changed, Inference) and changed.tokens is not None and any(before[key] != after[key] for key in _SPELLED):
        return replace(changed, tokens=None, tags={**changed.tags, TAG: "tokens"})
    return changed


def _same_identity(changed: Record, record: Record) -> Record:
    """Ids, scenario, time and references are the log's own."""
    match changed, record:
        case Report(), Report():
            return replace(changed, id=record.id, created_at=record.created_at, references=record.references)
        case Inference(), _:
            return replace(changed, id=record.id, created_at=record.created_at)
        case Instruction(), _:
            return replace(changed, id=record.id, created_at=record.created_at)
    return changed


def _parsed(document: dict[str, Any]) -> dict[str, Any]:
    """A deep copy, with the request as an object where it is one: what a hook wants to see."""
    copy: dict[str, Any] = orjson.loads(orjson.dumps(document))
    if isinstance(copy.get("request"), str):
        with suppress(orjson.JSONDecodeError):
            copy["request"] = orjson.loads(copy["request"])
    return copy


def _restored(after: dict[str, Any], before: Mapping[str, Any], record: Record) -> dict[str, Any]:
    """An untouched request keeps its exact bytes; a changed one is written anew."""
    if isinstance(record, Inference) and "request" in after:
        if after["request"] == before["request"]:
            after["request"] = to_document(record)["request"]
        elif not isinstance(after["request"], str | Mapping):
            after["request"] = orjson.dumps(after["request"]).decode()
    return after


def _cause(error: Exception) -> str:
    """The kind of failure only: the message of a foreign error may quote what was to be hidden."""
    return error.message if isinstance(error, ReefError) else type(error).__name__
