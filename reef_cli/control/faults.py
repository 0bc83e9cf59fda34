"""Errors of the HTTP API turned back into the classes they were raised as, so that exit codes hold across the wire."""

import json
from collections.abc import Mapping
from typing import Any

from reef_cli.core.errors import (
    AuthError,
    ConflictError,
    InvalidRequest,
    NotFoundError,
    ReefError,
    UnavailableError,
    UpstreamError,
    leaves,
)

_BY_STATUS: Mapping[int, type[ReefError]] = {
    400: InvalidRequest,
    401: AuthError,
    403: AuthError,
    404: NotFoundError,
    409: ConflictError,
    413: InvalidRequest,
    422: InvalidRequest,
    429: UnavailableError,
    502: UpstreamError,
    503: UnavailableError,
    504: UpstreamError,
}


def error_of(status: int, body: bytes) -> ReefError:
    """The error a non-2xx answer stands for: by its code, else by its status. Understands the dialects' error shapes too."""
    fields = _fields(body)
    cls = _class_of(str(fields.get("code") or fields.get("type") or ""), status)
    message = str(fields.get("message") or f"the server answered {status}")
    details = fields.get("details")
    error = cls(message, why=str(fields.get("why") or ""), hint=str(fields.get("hint") or _hint(cls)))
    error.details = dict(details) if isinstance(details, dict) else {}
    if "head" in fields:
        error.details.setdefault("head", fields["head"])
    return error


def _class_of(code: str, status: int) -> type[ReefError]:
    for cls in leaves():
        if cls.code == code:
            return cls
    return _BY_STATUS.get(status, ReefError)


def _fields(body: bytes) -> dict[str, Any]:
    try:
        raw = json.loads(body)
    except ValueError:
        return {}
    error = raw.get("error") if isinstance(raw, dict) else None
    return error if isinstance(error, dict) else {"message": error} if isinstance(error, str) else {}


def _hint(cls: type[ReefError]) -> str:
    if issubclass(cls, AuthError):
        return "set REEF_TOKEN, or give --token-file with the server's <home>/token"
    return ""
