"""`/healthz` (alive) and `/readyz` (can serve): open to everybody, so they tell nothing but that."""

from reef_cli import __version__
from reef_cli.core.errors import Draining, EngineUnavailable
from reef_cli.gateway.answers import answer
from reef_cli.gateway.deps import Route, deps_of
from reef_cli.gateway.http import Request, Response


async def healthz(_: Request) -> Response:
    """The process answers."""
    return answer({"status": "ok", "version": __version__})


async def readyz(request: Request) -> Response:
    """Requests can be served; else 503 with the reason in words."""
    deps = deps_of(request)
    if deps.draining.active:
        raise Draining("the server is shutting down, try again shortly")
    reason = deps.ready()
    if reason is not None:
        raise EngineUnavailable(f"not ready: {reason}")
    return answer({"status": "ready"})


ROUTES: tuple[Route, ...] = (("GET", "/healthz", healthz), ("GET", "/readyz", readyz))
