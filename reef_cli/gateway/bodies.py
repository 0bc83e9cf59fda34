"""Reading request bodies: bounded in size before and after decompression, strict JSON, and always an object where one is due.

gzip and deflate are undone here with a limit on what comes out, so that a small body cannot become a large one; other encodings
are refused by name. JSON is strict (RFC 8259): no NaN, no Infinity, no number that overflows a double, no lone surrogates.
"""

import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from reef_cli.core.errors import BodyTooLarge, InvalidRequest
from reef_cli.gateway.http import Request

_WINDOW = {"gzip": 31, "x-gzip": 31, "deflate": 15}


async def read_body(request: Request, limit: int) -> bytes:
    """The body, decompressed; `BodyTooLarge` over `limit` bytes, `InvalidRequest` for an encoding that cannot be undone."""
    body = request.body
    if body.length is not None and body.length > limit:
        raise too_large(limit)
    raw = body.arrived()
    if not body.done:
        chunks, size = [raw], len(raw)
        while size <= limit and (chunk := await body.chunk()):
            size += len(chunk)
            chunks.append(chunk)
        raw = b"".join(chunks)
    if len(raw) > limit:
        raise too_large(limit)
    encoding = request.headers.get("Content-Encoding")
    if encoding is None or (name := encoding.strip().lower()) in ("identity", ""):
        return raw
    return decompress(raw, name, limit)


def too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than {limit} bytes", limit=limit)


def decompress(raw: bytes, encoding: str, limit: int) -> bytes:
    """The original of a gzip or deflate body of at most `limit` bytes."""
    if encoding not in _WINDOW:
        raise InvalidRequest(
            "the body's content-encoding is not supported",
            hint="send it uncompressed, or with gzip or deflate",
            param="content-encoding",
        )
    engine = zlib.decompressobj(_WINDOW[encoding])
    try:
        out = engine.decompress(raw, limit + 1)
    except zlib.error as error:
        raise InvalidRequest(f"the body is not valid {encoding}") from error
    if len(out) > limit:
        raise too_large(limit)
    if not engine.eof or engine.unused_data:
        raise InvalidRequest(f"the body is not one whole {encoding} stream")
    return out


def parse_object(raw: bytes) -> dict[str, Any]:
    """The body as a JSON object, or `InvalidRequest`."""
    value = parse_json(raw)
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object", hint=f"it is {kind_of(value)}")
    return value


def parse_json(raw: bytes) -> Any:
    """Any JSON value, or `InvalidRequest` that says where it stops being JSON and never repeats the text."""
    if not raw or raw.isspace():
        raise InvalidRequest("the body is empty", hint="send a JSON object")
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        if "infinity" in str(error) or _names_no_number(error):
            raise InvalidRequest("every number in the body must be finite", why="NaN and Infinity are not JSON") from error
        raise InvalidRequest(
            f"the body is not valid JSON at line {error.lineno}, column {error.colno}",
            hint="check for a cut body, trailing commas, or quotes",
        ) from error


def _names_no_number(error: orjson.JSONDecodeError) -> bool:
    return error.doc[error.pos :].lstrip("+-").startswith(("NaN", "nan", "Inf", "inf"))


async def read_object(request: Request, limit: int) -> dict[str, Any]:
    """`read_body` and `parse_object` in one."""
    return parse_object(await read_body(request, limit))


def only(body: Mapping[str, Any], allowed: Iterable[str]) -> None:
    """`InvalidRequest` naming the first field that is not among `allowed`: a misspelt field must not vanish silently."""
    names = sorted(allowed)
    for name in body:
        if name not in names:
            raise InvalidRequest(f"unknown field {name[:64]!r}", hint=f"fields are: {', '.join(names)}", param=name[:64])


def text_field(body: Mapping[str, Any], name: str, *, longest: int = 256, required: bool = False) -> str | None:
    """A string field without surrounding blanks; null counts as absent. `InvalidRequest` when it is something else or blank."""
    value = body.get(name)
    if value is None:
        if required:
            raise InvalidRequest(f"{name} is missing", param=name)
        return None
    if not isinstance(value, str):
        raise InvalidRequest(f"{name} must be a string", hint=f"it is {kind_of(value)}", param=name)
    if not value.strip() or len(value) > longest:
        raise InvalidRequest(f"{name} must hold 1 to {longest} characters", param=name)
    return value.strip()


def object_field(body: Mapping[str, Any], name: str) -> dict[str, Any]:
    """An object field, empty when absent or null."""
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} must be an object", hint=f"it is {kind_of(value)}", param=name)
    return value


def kind_of(value: object) -> str:
    """JSON's own word for a value's type."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "a string"
    return "an array" if isinstance(value, list) else "an object"


def int_query(request: Request, name: str, default: int, *, least: int = 0, most: int | None = None) -> int:
    """An integer query parameter within bounds, or `InvalidRequest`."""
    text = request.query.get(name)
    if text is None:
        return default
    if not text.isascii() or not text.removeprefix("-").isdigit() or len(text) > 18:
        raise InvalidRequest(f"{name} must be an integer", param=name)
    value = int(text)
    if value < least or (most is not None and value > most):
        raise InvalidRequest(
            f"{name} must be {least} or more" + (f" and at most {most}" if most is not None else ""), param=name
        )
    return value
