"""An exchange as the columns of its payload row, and back. Pure functions; deltas are `delta`'s business.

Token arrays are little-endian int32 and float32 (float64 when an engine's log-probs do not fit); prompt and output ids form
one text, since the next turn's prompt starts with both. Messages that are the body's own are kept as their place in it.
"""

import re
import sys
from array import array
from collections.abc import Mapping, Sequence
from struct import Struct
from typing import Any, NamedTuple

import orjson

from reef_cli.core.errors import InvalidRequest
from reef_cli.core.ids import RecordId
from reef_cli.core.types import Inference, TokenSpan, TokenTrace
from reef_cli.experience.codec import digest, dumps, sorted_json

_MESSAGES = re.compile(rb'"messages"\s*:\s*')
_NAME = b'"messages"'
_MEMBER = _NAME + b":"
_LAST_8_OF_21 = Struct("<13xq").unpack


class Payload(NamedTuple):
    """Everything of an exchange but its id and time. `talk` is empty when `meta` says where in the body the messages are.

    `span` is where they begin and end in it, where that is known.
    """

    meta: bytes
    body: bytes
    talk: bytes
    ids: bytes
    logprobs: bytes
    mask: bytes
    digest: bytes
    body_hash: int
    span: tuple[int, int]

    @property
    def size(self) -> int:
        return len(self.meta) + len(self.body) + len(self.talk) + len(self.ids) + len(self.logprobs) + len(self.mask)


def encode(record: Inference) -> Payload:
    """The payload of a record. Raises `InvalidRequest` for what cannot be stored exactly."""
    meta = _meta(record)
    talk, place, said = _talk(record)
    ids = logprobs = mask = b""
    if record.tokens is not None:
        meta["tokens"], ids, logprobs, mask = _pack_trace(record.tokens)
    # The body is hashed once: transcripts grow long, and retries are found by the same hash.
    body_mark = digest(record.request)
    mark = digest(b"inference", record.scenario.encode(), sorted_json(meta), body_mark, said, ids, logprobs, mask)
    if place is not None:
        meta["messages"] = place
    span = (place[0], place[0] + place[1]) if isinstance(place, list) else (0, 0)
    return Payload(dumps(meta), record.request, talk, ids, logprobs, mask, mark, _LAST_8_OF_21(body_mark)[0], span)


def _meta(record: Inference) -> dict[str, Any]:
    """What is said of an exchange besides its texts and tokens; what is None, empty or the rule is left out.

    Field by field: in a loop over their names this took five times as long.
    """
    meta: dict[str, Any] = {"dialect": record.dialect, "model": record.model, "response": record.response}
    if record.finish is not None:
        meta["finish"] = record.finish
    if record.release_id is not None:
        meta["release_id"] = record.release_id
    if record.weight_version is not None:
        meta["weight_version"] = record.weight_version
    if record.session is not None:
        meta["session"] = record.session
    if record.error is not None:
        meta["error"] = record.error
    if record.tags:
        meta["tags"] = record.tags
    if record.usage:
        meta["usage"] = record.usage
    if record.timings:
        meta["timings"] = record.timings
    if record.raw_text is not None:
        same = record.response is not None and record.raw_text == record.response.get("content")
        meta["raw_text"] = True if same else record.raw_text
    if record.stream:
        meta["stream"] = True
    if not record.complete:
        meta["complete"] = False
    return meta


def _talk(record: Inference) -> tuple[bytes, list[int] | bool | None, bytes]:
    """`(bytes to store, place, bytes to digest)` of the messages.

    The place is where in the body they stand, True when parsing it gives them, None when they are stored themselves. The digest
    needs them only where the body does not tell them, and does not mind the order of their keys.
    """
    canonical, body = dumps(record.messages), record.request
    # Most clients write it like this; the same name before it is for the search.
    at = body.find(_MEMBER)
    if at >= 0 and body.startswith(canonical, at + len(_MEMBER)) and body.find(_NAME, 0, at) < 0:
        return b"", [at + len(_MEMBER), len(canonical)], b""
    found = _MESSAGES.search(body)
    if found is not None and body.startswith(canonical, found.end()):
        return b"", [found.end(), len(canonical)], b""
    said = sorted_json(record.messages)
    parsed = _body_messages(body) if found is not None else None
    if parsed is None or sorted_json(parsed) != said:
        return canonical, None, said
    return (b"", True, b"") if orjson.dumps(parsed) == canonical else (canonical, None, b"")


def _body_messages(body: bytes) -> Any:
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return parsed.get("messages") if isinstance(parsed, dict) else None


def decode(
    record_id: str,
    scenario: str,
    created_at: float,
    meta: bytes,
    body: bytes,
    talk: bytes,
    ids: bytes,
    logprobs: bytes,
    mask: bytes,
) -> Inference:
    """The record that `encode` was given."""
    fields: dict[str, Any] = orjson.loads(meta)
    match fields.pop("messages", None):
        case [int(start), int(length)]:
            messages = orjson.loads(body[start : start + length])
        case True:
            messages = orjson.loads(body)["messages"]
        case _:
            messages = orjson.loads(talk)
    if fields.get("raw_text") is True:
        fields["raw_text"] = fields["response"]["content"]
    if (shape := fields.pop("tokens", None)) is not None:
        fields["tokens"] = _unpack_trace(shape, ids, logprobs, mask)
    return Inference(
        id=RecordId(record_id), scenario=scenario, created_at=created_at, request=body, messages=messages, **fields
    )


def _pack_trace(trace: TokenTrace) -> tuple[dict[str, Any], bytes, bytes, bytes]:
    try:
        ids = array("i", trace.prompt_ids)
        ids.extend(trace.output_ids)
        narrow = array("f", trace.logprobs)
        mask = b"" if all(value == 1 for value in trace.loss_mask) else _little(array("i", trace.loss_mask))
    except (OverflowError, TypeError) as error:
        raise InvalidRequest("token ids must be 32-bit integers and log-probs numbers", why=str(error)) from error
    exact = narrow.tolist() == list(trace.logprobs)
    shape = {
        "n": [len(trace.prompt_ids), len(trace.output_ids), len(trace.logprobs), len(trace.loss_mask)],
        "width": 4 if exact else 8,
        "spans": [[span.version, span.start, span.end] for span in trace.spans],
        "temperature": trace.temperature,
        "finish": trace.finish,
    }
    return shape, _little(ids), _little(narrow if exact else array("d", trace.logprobs)), mask


def _unpack_trace(shape: Mapping[str, Any], ids: bytes, logprobs: bytes, mask: bytes) -> TokenTrace:
    prompt, output, _, masked = shape["n"]
    tokens = _values("i", ids)
    return TokenTrace(
        prompt_ids=tuple(tokens[:prompt]),
        output_ids=tuple(tokens[prompt : prompt + output]),
        logprobs=tuple(_values("f" if shape["width"] == 4 else "d", logprobs)),
        loss_mask=tuple(_values("i", mask)) if mask else (1,) * masked,
        spans=tuple(TokenSpan(version, start, end) for version, start, end in shape["spans"]),
        temperature=shape["temperature"],
        finish=shape["finish"],
    )


def _little(values: "array[Any]") -> bytes:
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def _values(code: str, data: bytes) -> Sequence[Any]:
    values = array(code)
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()
