"""Matching paths: doubled slashes are tolerated, and `/s/<scenario>/v1/...` reaches the same handlers as `/v1/...`.

A pattern is text with `{name}` for one segment and `{name:regex}` for what the expression takes. Matching sees a cleaned path;
handlers still see the request as it came. Knows nothing of the routes themselves.
"""

import re
from collections.abc import Iterable
from urllib.parse import unquote

from reef_cli.core.errors import MethodNotAllowed, RouteNotFound
from reef_cli.gateway.context import split_scenario_path
from reef_cli.gateway.http import Handler, Request, StreamResponse

_SLASHES = re.compile(r"//+")
_PLACE = re.compile(r"\{(\w+)(?::([^{}]+))?\}")


def merge_slashes(path: str) -> str:
    return _SLASHES.sub("/", path)


class Router:
    """Rows of `(method, pattern, handler)`; a GET answers HEAD too."""

    def __init__(self, routes: Iterable[tuple[str, str, Handler]]) -> None:
        self._plain: dict[tuple[str, str], Handler] = {}
        self._methods: dict[str, dict[str, Handler]] = {}
        self._shapes: list[tuple[re.Pattern[str], str]] = []
        for method, pattern, handler in routes:
            if pattern not in self._methods and _PLACE.search(pattern):
                self._shapes.append((_shape(pattern), pattern))
            methods = self._methods.setdefault(pattern, {})
            for name in (method, "HEAD") if method == "GET" else (method,):
                if name in methods and name != "HEAD":
                    raise ValueError(f"{name} {pattern} has two handlers")
                methods[name] = handler
                if not _PLACE.search(pattern):
                    self._plain[name, pattern] = handler

    def find(self, request: Request) -> Handler:
        """The handler; the request learns its `route` and `match_info`. For what is not there, a handler that raises."""
        path = request.path
        handler = self._plain.get((request.method, path))  # as nearly every request has it
        if handler is not None:
            request.route = path
            return handler
        if "//" in path or path.startswith("/s/"):
            path = merge_slashes(split_scenario_path(path)[1])
        pattern = path if path in self._methods and not _PLACE.search(path) else self._match(request, path)
        if pattern is None:
            return _missing
        request.route = pattern
        methods = self._methods[pattern]
        return methods.get(request.method) or _refusing(request.method, sorted(methods))

    def _match(self, request: Request, path: str) -> str | None:
        for shape, pattern in self._shapes:
            if (match := shape.fullmatch(path)) is not None:
                request.match_info = {name: unquote(value) for name, value in match.groupdict().items()}
                return pattern
        return None


def _shape(pattern: str) -> re.Pattern[str]:
    parts, at = [], 0
    for place in _PLACE.finditer(pattern):
        parts += [re.escape(pattern[at : place.start()]), f"(?P<{place[1]}>{place[2] or '[^{}/]+'})"]
        at = place.end()
    return re.compile("".join((*parts, re.escape(pattern[at:]))))


async def _missing(_: Request) -> StreamResponse:
    raise RouteNotFound("there is no such path", hint="see docs/http-api.md for the routes")


def _refusing(method: str, allowed: list[str]) -> Handler:
    async def refuse(_: Request) -> StreamResponse:
        raise MethodNotAllowed(f"{method} is not allowed here", hint=f"use {' or '.join(allowed)}", allow=allowed)

    return refuse
