"""Records to bytes and back: the JSON document of a record (import, export, redaction) and its content digest.

A document is plain JSON. The request body is text when it is UTF-8 and `{"base64": ...}` otherwise, so it comes back byte for
byte. Digests leave out the time, so that a re-sent report or re-imported record is recognised.
"""

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from hashlib import sha256
from struct import Struct
from typing import Any, get_args

import orjson

from reef_cli.core.errors import InvalidRequest
from reef_cli.core.ids import RecordId
from reef_cli.core.types import Dialect, Inference, Report, TokenSpan, TokenTrace
from reef_cli.experience.model import Instruction

Record = Inference | Report | Instruction
ID_LIMIT = 200
_LENGTHS = tuple(Struct(f"<{count}Q").pack for count in range(9))


def dumps(value: Any) -> bytes:
    """JSON bytes. Raises `InvalidRequest` for what JSON cannot hold (lone surrogates, foreign types)."""
    try:
        return orjson.dumps(value, default=_known)
    except TypeError as error:
        raise InvalidRequest("the record holds a value that is not JSON", why=str(error)) from error


def digest(*parts: bytes) -> bytes:
    """A digest over up to 8 parts whose borders count; the first byte names the algorithm (2: SHA-256, its first 160 bits).

    Processors have instructions for SHA-256, and a prompt of 100 KB is hashed with every turn.
    """
    hashed = sha256(_LENGTHS[len(parts)](*map(len, parts)))
    # One call for all of them; joining a single part would copy nothing, since it is given back as it is.
    hashed.update(b"".join(parts))
    return b"\x02" + hashed.digest()[:20]


def sorted_json(value: Any) -> bytes:
    """Canonical JSON for digests."""
    try:
        return orjson.dumps(value, default=_known, option=orjson.OPT_SORT_KEYS)
    except TypeError as error:
        raise InvalidRequest("the record holds a value that is not JSON", why=str(error)) from error


def _known(value: Any) -> Any:
    """Read-only mappings and other sequences are JSON in spirit."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"type {type(value).__name__} is not JSON")


def to_document(record: Record) -> dict[str, Any]:
    """The JSON form of a record; `from_document` reverses it exactly."""
    match record:
        case Inference():
            return _inference_document(record)
        case Report():
            return {"kind": "report", **asdict(record), "references": list(record.references)}
        case Instruction():
            return {"kind": "train", **asdict(record)}


def _inference_document(record: Inference) -> dict[str, Any]:
    document: dict[str, Any] = {"kind": "inference"}
    for name in Inference.__dataclass_fields__:
        document[name] = getattr(record, name)
    document["request"] = body_document(record.request)
    document["messages"] = list(record.messages)
    document["tags"] = dict(record.tags)
    if record.tokens is not None:
        document["tokens"] = asdict(record.tokens)
        # JSON has no infinities; a broken engine's log-probs are kept as they came, spelled out.
        document["tokens"]["logprobs"] = [value if math.isfinite(value) else str(value) for value in record.tokens.logprobs]
    return document


def body_document(body: bytes) -> str | dict[str, str]:
    """A body as JSON: text where possible."""
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(body).decode("ascii")}


def from_document(document: Any, scenario: str | None = None) -> Record:
    """A record from its JSON form; `scenario` replaces the one named in it. Raises `InvalidRequest` naming the field."""
    if not isinstance(document, Mapping):
        raise InvalidRequest("a record must be a JSON object")
    fields = {
        name: value for name, value in document.items() if name not in ("kind", "sequence", "scenario", "role", "evicted")
    }
    fields["scenario"] = scenario if scenario is not None else _text(document, "scenario")
    fields["id"] = checked_id(document.get("id"))
    fields["created_at"] = _number(document, "created_at")
    match document.get("kind", "inference"):
        case "inference":
            return _inference(_known_fields(fields, Inference.__dataclass_fields__))
        case "report":
            return _report(_known_fields(fields, Report.__dataclass_fields__))
        case "train":
            return _instruction(_known_fields(fields, Instruction.__dataclass_fields__))
        case kind:
            raise InvalidRequest(f"unknown record kind {kind!r}", hint="inference, report or train")


def _known_fields(fields: dict[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    if unknown := sorted(set(fields) - set(known)):
        raise InvalidRequest(f"a record has no field {unknown[0]!r}")
    return fields


def _inference(fields: dict[str, Any]) -> Inference:
    if fields.get("dialect") not in get_args(Dialect):
        raise InvalidRequest("dialect must be chat, completions, messages or responses")
    fields["request"] = _body(fields.get("request"))
    messages = fields.setdefault("messages", _messages_of(fields["request"]))
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise InvalidRequest("messages must be a list of objects")
    for name, types in (("response", dict), ("tags", dict), ("usage", dict), ("timings", dict)):
        if fields.get(name) is not None and not isinstance(fields[name], types):
            raise InvalidRequest(f"{name} must be an object")
        if name != "response" and fields.get(name, ...) is None:
            del fields[name]  # null says no more than leaving it out
    if not all(isinstance(value, str) for value in fields.get("tags", {}).values()):
        raise InvalidRequest("tags must be strings")
    for name in ("finish", "raw_text", "release_id", "weight_version", "session", "error"):
        if fields.get(name) is not None and not isinstance(fields[name], str):
            raise InvalidRequest(f"{name} must be a string")
    for name in ("stream", "complete"):
        if not isinstance(fields.get(name, False), bool):
            raise InvalidRequest(f"{name} must be true or false")
    fields["model"] = _text(fields, "model")
    fields.setdefault("response", None)
    fields["tokens"] = _trace(fields["tokens"]) if fields.get("tokens") is not None else None
    return Inference(**fields)


def _report(fields: dict[str, Any]) -> Report:
    references = fields.get("references", [])
    if not isinstance(references, list | tuple) or not all(isinstance(item, str) for item in references):
        raise InvalidRequest("references must be a list of record ids")
    fields["references"] = tuple(RecordId(item) for item in references)
    report = Report(**fields)
    check_report(report)
    return report


def _instruction(fields: dict[str, Any]) -> Instruction:
    fields["text"] = _text(fields, "text")
    if not isinstance(fields.get("session"), str | None):
        raise InvalidRequest("session must be a string")
    if fields.get("metadata") is None:
        fields["metadata"] = {}
    if not isinstance(fields["metadata"], Mapping) or not _finite(fields["metadata"]):
        raise InvalidRequest("metadata must be an object whose numbers are finite")
    return Instruction(**fields)


def check_report(report: Report) -> None:
    """Refuse a report that no reader could use: nothing in it, a score that is no finite number, non-JSON metadata."""
    checked_id(report.id)
    score = report.score
    if score is None and report.feedback is None:
        raise InvalidRequest("a report needs a score or feedback")
    if score is not None and (isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score)):
        raise InvalidRequest("score must be a finite number")
    if report.feedback is not None and not isinstance(report.feedback, str | Mapping):
        raise InvalidRequest("feedback must be a string or an object")
    if not isinstance(report.metadata, Mapping):
        raise InvalidRequest("metadata must be an object")
    if not (_finite(report.feedback) and _finite(report.metadata)):
        raise InvalidRequest("numbers in feedback and metadata must be finite")


def _finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, Mapping):
        return all(_finite(item) for item in value.values())
    return not isinstance(value, Sequence) or isinstance(value, str) or all(_finite(item) for item in value)


def checked_id(value: Any) -> RecordId:
    """A record id: 1 to 200 printable characters."""
    if not isinstance(value, str) or not 0 < len(value) <= ID_LIMIT or not value.isprintable():
        raise InvalidRequest(f"a record id must be 1 to {ID_LIMIT} printable characters")
    return RecordId(value)


def _body(value: Any) -> bytes:
    if isinstance(value, str):
        try:
            return value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequest("request is not valid text", why=str(error)) from error
    if isinstance(value, Mapping) and isinstance(value.get("base64"), str):
        try:
            return base64.b64decode(value["base64"], validate=True)
        except ValueError as error:
            raise InvalidRequest("request is not valid base64", why=str(error)) from error
    if isinstance(value, Mapping):
        return dumps(value)
    raise InvalidRequest("request must be the client's body: text, an object, or {base64: ...}")


def _messages_of(body: bytes) -> Any:
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError:
        return []
    return parsed.get("messages", []) if isinstance(parsed, dict) else []


def _trace(value: Any) -> TokenTrace:
    try:
        spans = tuple(TokenSpan(str(span["version"]), int(span["start"]), int(span["end"])) for span in value["spans"])
        return TokenTrace(
            prompt_ids=tuple(map(int, value["prompt_ids"])),
            output_ids=tuple(map(int, value["output_ids"])),
            logprobs=tuple(map(float, value["logprobs"])),
            loss_mask=tuple(map(int, value["loss_mask"])),
            spans=spans,
            temperature=float(value.get("temperature", 1.0)),
            finish=str(value.get("finish", "stop")),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidRequest("tokens is not a token trace", why=str(error)) from error


def _text(document: Mapping[str, Any], name: str) -> str:
    value = document.get(name)
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{name} must be a non-empty string")
    return value


def _number(document: Mapping[str, Any], name: str) -> float:
    value = document.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidRequest(f"{name} must be seconds since 1970")
    return float(value)
