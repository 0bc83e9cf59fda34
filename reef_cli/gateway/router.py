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
    """The usual dispatcher over a cleaned path."""

    async def resolve(self, request: web.Request) -> web.UrlMappingMatchInfo:
        raw = request.rel_url.raw_path
        if "//" in raw or raw.startswith("/s/"):
            clean = merge_slashes(split_scenario_path(raw)[1])
            request = request.clone(rel_url=URL(clean, encoded=True))
        return await super().resolve(request)
