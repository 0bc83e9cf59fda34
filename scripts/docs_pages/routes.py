"""The table of HTTP routes, from the tables the gateway mounts and the rights they need."""

import re
from collections.abc import Callable
from typing import Any

from docs_pages.markdown import code
from docs_pages.markdown import table as markdown
from reef_cli.gateway.access import OPEN, need
from reef_cli.gateway.routes import all_routes
from reef_cli.supervisor import harness

SPOKEN = {  # handlers made by a factory, or whose name says it all
    "/v1/chat/completions": "Chat completions, OpenAI's shape.",
    "/v1/completions": "Text completions, OpenAI's shape.",
    "/v1/messages": "Messages, Anthropic's shape.",
    "/v1/responses": "Responses, OpenAI's shape.",
    "/reef/scenarios/{scenario}/resume": "Jobs start again.",
    "/reef/scenarios/{scenario}/releases/{release}": "One release.",
}


def every_route() -> list[tuple[str, str, Callable[..., Any]]]:
    """Method, path and handler of the gateway's routes and of the harness's; patterns of path parts left out."""
    found = (*all_routes(), *harness.described())
    return [(method, re.sub(r"\{(\w+):[^}]*\}", r"{\1}", path), handler) for method, path, handler in found]


def table() -> str:
    """Method, path, the token's scope, and the first sentence of the handler."""
    rows = []
    for method, path, handler in every_route():
        wanted = need(method, path)
        scope = "none" if path in OPEN else wanted.scope.value if wanted.scope else "any"
        first = " ".join((handler.__doc__ or "").split("\n\n")[0].split())
        rows.append((code(method), code(path), scope, SPOKEN.get(path) or first))
    return markdown(("method", "path", "scope", "what"), rows)
