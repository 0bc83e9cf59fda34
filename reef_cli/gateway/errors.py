"""How an error looks on the wire: status, headers and body, in the dialect of the route.

Real agents decide by the wording whether to try again, so it is part of the contract: final errors are kept free of the words
and status digits that agents take for a passing trouble, passing ones always carry such a word, and 429 and 503 always carry
`retry-after`. The words of providers are relayed as they came; the rules here are for our own. No traceback leaves the process.
"""

import math
import re
from collections.abc import Mapping
from typing import Any, Literal

import orjson

from reef_cli.core.errors import (
    ContextOverflow,
    Draining,
    MethodNotAllowed,
    ReefError,
)
from reef_cli.core.ids import random_hex
from reef_cli.core.types import Dialect
from reef_cli.gateway.http import Response

ErrorDialect = Literal["openai", "anthropic", "reef"]

_DIGITS = re.compile(r"429|500|502|503|504|524")
_PASSING_WORD = re.compile(
    r"server error|internal error|time-?out|timed out|overloaded|rate limit|connection error|try again|retry", re.IGNORECASE
)
_CALMER = (
    (re.compile(r"server error|internal error", re.IGNORECASE), "failure"),
    (re.compile(r"time-?out", re.IGNORECASE), "time limit"),
    (re.compile(r"rate limit", re.IGNORECASE), "limit"),
    (re.compile(r"connection error", re.IGNORECASE), "failure to connect"),
    (re.compile(r"overloaded", re.IGNORECASE), "too busy"),
    (re.compile(r"billing", re.IGNORECASE), "payment"),
)
_SUFFIX = {
    429: "rate limit reached, try again shortly",
    500: "internal error",
    502: "upstream connection error",
    503: "overloaded, try again shortly",
    504: "timeout",
    507: "server error",
}
_OPENAI_TYPE = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
_ANTHROPIC_TYPE = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_LETTERS = str.maketrans("0123456789", "ghijkmnpqr")


def new_request_id() -> str:
    """An id of letters only: agents search error texts for status digits, and an id must not look like one."""
    return "req_" + random_hex(24).translate(_LETTERS)


def request_id_of(headers: Mapping[str, str]) -> str:
    """The caller's own `x-request-id` when it is short, plain and free of status digits, else a new one."""
    given = headers.get("x-request-id")
    if given is None:
        return new_request_id()
    return given if re.fullmatch(r"[A-Za-z0-9._-]{1,64}", given) and not _DIGITS.search(given) else new_request_id()


def error_dialect(path: str, headers: Mapping[str, str]) -> ErrorDialect:
    """The dialect of a path without its scenario prefix. `/v1/models` is Anthropic's when its version header is there."""
    if path.startswith("/v1/messages"):
        return "anthropic"
    if path.startswith("/v1/models") and "anthropic-version" in headers:
        return "anthropic"
    return "openai" if path == "/v1" or path.startswith("/v1/") else "reef"


def passing(status: int) -> bool:
    """Whether a status tells clients to try again. 501 says that this deployment cannot do it at all."""
    return status == 429 or (status >= 500 and status != 501)


def wording(error: ReefError) -> str:
    """The error's text for an agent: what, why and what to do, with the words its status calls for."""
    parts = [error.message] + [part for part in (error.why, error.hint) if part]
    text = "; ".join(parts)
    if passing(error.status):
        return text if _PASSING_WORD.search(text) else f"{text} ({_SUFFIX.get(error.status, 'server error')})"
    for pattern, replacement in _CALMER:
        text = pattern.sub(replacement, text)
    # The lengths in an overflow are what agents read there; everywhere else digits come from names in the request.
    return text if isinstance(error, ContextOverflow) else _DIGITS.sub("…", text)


def error_body(dialect: ErrorDialect, error: ReefError, request_id: str) -> dict[str, Any]:
    """The JSON body in one of the three shapes."""
    if dialect == "reef":
        return error.payload(request_id)
    status = error.status
    if dialect == "anthropic":
        kind = _ANTHROPIC_TYPE.get(status, "invalid_request_error" if status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": wording(error)}, "request_id": request_id}
    kind = _OPENAI_TYPE.get(status, "invalid_request_error" if status < 500 else "server_error")
    param = error.details.get("param")
    return {"error": {"message": wording(error), "type": kind, "param": param, "code": error.code}}


def retry_after(error: ReefError) -> str | None:
    """Whole seconds for `retry-after`; always there on 429 and 503, small by default because swaps are short."""
    asked = error.details.get("retry_after_s")
    if asked is None and error.status not in (429, 503):
        return None
    return str(max(1, math.ceil(asked if asked is not None else (5 if isinstance(error, Draining) else 2))))


def error_headers(error: ReefError, request_id: str) -> dict[str, str]:
    """Headers that go with an error's status."""
    headers = {"x-request-id": request_id}
    wait = retry_after(error)
    if wait is not None:
        headers["retry-after"] = wait
    if error.status == 401:
        headers["WWW-Authenticate"] = 'Bearer realm="reef"'
    if isinstance(error, MethodNotAllowed) and "allow" in error.details:
        headers["Allow"] = ", ".join(error.details["allow"])
    return headers


def error_response(dialect: ErrorDialect, error: ReefError, request_id: str) -> Response:
    """The whole answer for an error."""
    return Response(
        status=error.status,
        body=orjson.dumps(error_body(dialect, error, request_id), default=str),
        content_type="application/json",
        headers=error_headers(error, request_id),
    )


def stream_error(dialect: Dialect, error: ReefError, request_id: str, *, response: Mapping[str, Any] | None = None) -> bytes:
    """The frame that ends a stream after a 200. For the Responses dialect, `response` is the object so far and its
    `sequence_number` the next one."""
    if dialect == "messages":
        return _event("error", error_body("anthropic", error, request_id))
    body = error_body("openai", error, request_id)
    if dialect != "responses":
        return b"data: " + orjson.dumps(body) + b"\n\n"
    so_far = dict(response or {})
    number = so_far.pop("sequence_number", 0)
    failed = {
        "object": "response",
        "output": [],
        **so_far,
        "status": "failed",
        "error": {"code": _responses_code(error), "message": body["error"]["message"]},
    }
    return _event("response.failed", {"type": "response.failed", "sequence_number": number, "response": failed})


def _responses_code(error: ReefError) -> str:
    if isinstance(error, ContextOverflow):
        return "context_length_exceeded"
    if error.status == 429:
        return "rate_limit_exceeded"
    return "server_error" if error.status >= 500 else "invalid_prompt"


def _event(kind: str, payload: Mapping[str, Any]) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps(payload) + b"\n\n"


def overflow(tokens: int, limit: int, dialect: Dialect) -> ContextOverflow:
    """The context overflow in the phrase agents of this dialect recognise."""
    if dialect == "messages":
        return ContextOverflow(f"prompt is too long: {tokens} tokens > {limit} maximum")
    return ContextOverflow(
        f"This model's maximum context length is {limit} tokens. However, your request has {tokens} input tokens.",
        hint="Please reduce the length of the input messages.",
    )
