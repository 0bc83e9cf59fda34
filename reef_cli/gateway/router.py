"""Matching paths: doubled slashes are tolerated, and `/s/<scenario>/v1/...` reaches the same handlers as `/v1/...`.

Matching sees a cleaned path; handlers still see the request as it came. Knows nothing of the routes themselves.
"""

import re

from aiohttp import web
from yarl import URL

from reef_cli.gateway.context import split_scenario_path

_SLASHES = re.compile(r"//+")


def merge_slashes(path: str) -> str:
    return _SLASHES.sub("/", path)


class TolerantRouter(web.UrlDispatcher):
    """The usual dispatcher over a cleaned path. Paths without parameters are found at once, as nearly every request has one."""

    def __init__(self) -> None:
        super().__init__()
        self._plain: dict[tuple[str, str], web.AbstractRoute] = {}

    def know(self, route: web.AbstractRoute) -> None:
        """Find this route at once from now on, where its path is nothing but text."""
        resource = route.resource
        if isinstance(resource, web.PlainResource):
            self._plain[route.method, resource.canonical] = route

    async def resolve(self, request: web.Request) -> web.UrlMappingMatchInfo:
        raw = request.rel_url.raw_path
        if (route := self._plain.get((request.method, raw))) is not None:
            return web.UrlMappingMatchInfo({}, route)
        if "//" in raw or raw.startswith("/s/"):
            clean = merge_slashes(split_scenario_path(raw)[1])
            request = request.clone(rel_url=URL(clean, encoded=True))
        return await super().resolve(request)
