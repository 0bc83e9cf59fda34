"""Which pages in a browser may call: those of the listed origins, and no other. Off unless origins are listed.

A preflight is answered without a token, since browsers send none with it; the request itself needs one like any other.
"""

import re
from collections.abc import Callable, Collection

from reef_cli.gateway.http import Request, Response, StreamResponse

_NAMES = re.compile(r"[A-Za-z0-9_-]+(\s*,\s*[A-Za-z0-9_-]+)*")
_EXPOSED = "x-reef-agent-record-id, x-reef-release-id, x-reef-weight-version, x-request-id, retry-after"

Prepare = Callable[[Request, StreamResponse], None]


def listed_origin(request: Request, origins: Collection[str]) -> str | None:
    """The page's origin when it is listed."""
    origin = request.headers.get("Origin")
    return origin if origin in origins else None


def preflight(request: Request, origins: Collection[str]) -> Response | None:
    """The answer to a listed page's preflight; None for every other request."""
    asked = request.headers.get("Access-Control-Request-Method")
    if request.method != "OPTIONS" or asked is None or listed_origin(request, origins) is None:
        return None
    headers = {"Access-Control-Allow-Methods": "GET, POST, PUT, DELETE", "Access-Control-Max-Age": "600"}
    names = request.headers.get("Access-Control-Request-Headers", "").strip()
    if _NAMES.fullmatch(names):
        headers["Access-Control-Allow-Headers"] = names
    return Response(status=204, headers=headers)


def allowing(origins: Collection[str]) -> Prepare:
    """What tells browsers that a listed page may read an answer, streamed ones included; runs as headers go out."""

    def allow(request: Request, response: StreamResponse) -> None:
        origin = listed_origin(request, origins)
        response.headers["Vary"] = "Origin"
        if origin is not None:
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = _EXPOSED

    return allow
