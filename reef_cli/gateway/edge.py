"""The outermost layer of every request: id, authentication, rate, draining, errors, metrics, and one log line for failures.

One middleware instead of a stack, because each layer costs every request. It never reads a body and never logs one. Whatever
goes wrong inside, the client gets an error of the closed list in the dialect of the path, never a traceback.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from aiohttp import web

from reef_cli.core.errors import AuthError, Draining, ReefError
from reef_cli.gateway import access
from reef_cli.gateway.auth import Principal, authenticate, presented_token
from reef_cli.gateway.context import Facts, set_facts, split_scenario_path
from reef_cli.gateway.cors import preflight
from reef_cli.gateway.deps import Deps, hold_deps
from reef_cli.gateway.errors import error_dialect, error_response, from_http, request_id_of
from reef_cli.gateway.limits import RateLimit
from reef_cli.gateway.router import merge_slashes
from reef_cli.gateway.tracing import answered

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
RATE: web.AppKey[RateLimit] = web.AppKey("reef_rate", RateLimit)
UNCOUNTED = frozenset({"/reef/events"})
_log = logging.getLogger(__name__)


def canonical_path(request: web.Request) -> str:
    """The path without a scenario prefix and doubled slashes."""
    raw = request.rel_url.raw_path
    return raw if "//" not in raw and not raw.startswith("/s/") else merge_slashes(split_scenario_path(raw)[1])


@web.middleware
async def edge(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Everything around a handler."""
    deps = hold_deps(request)
    path = canonical_path(request)
    headers = request.headers
    facts = Facts(request_id_of(headers), deps.clock.monotonic(), error_dialect(path, headers))
    set_facts(request, facts)
    counted = path not in UNCOUNTED
    if counted:
        deps.draining.enter()
    try:
        with deps.tracer.span(headers) as span:
            response = await _guarded(request, handler, deps, path, facts)
            if span is not None:
                answered(span, request, response, facts.request_id)
    finally:
        if counted:
            deps.draining.leave()
    if not response.prepared:
        response.headers["x-request-id"] = facts.request_id
    _measure(deps, request, response, facts)
    return response


async def _guarded(request: web.Request, handler: Handler, deps: Deps, path: str, facts: Facts) -> web.StreamResponse:
    """The handler's answer, or the answer for what it raised."""
    try:
        if request.method == "OPTIONS" and (allowed := preflight(request, deps.settings.cors_origins)) is not None:
            return allowed
        await _admit(request, deps, path, facts)
        return await handler(request)
    except asyncio.CancelledError:
        # The client left; aiohttp cancelled the handler, which has cleaned up. Nobody is there to answer.
        raise
    except ReefError as error:
        return _refuse(deps, request, path, facts, error)
    except web.HTTPException as error:
        return error if error.status < 400 else _refuse(deps, request, path, facts, from_http(error))
    except ConnectionError:
        # The client's connection broke while we wrote; the write is the only thing that failed.
        raise
    except Exception:
        # The process edge: an unforeseen failure becomes one code, and its traceback goes to the log only.
        _log.exception("request failed", extra={"request_id": facts.request_id, "route": path})
        return _refuse(deps, request, path, facts, ReefError("internal error", hint="the server's log has the details"))


async def _admit(request: web.Request, deps: Deps, path: str, facts: Facts) -> None:
    """Refuse what may not come in: while draining, without a valid token, beyond the rate, out of scope."""
    if deps.draining.active and path not in access.ALIVE_WHILE_DRAINING:
        raise Draining("the server is shutting down, try again shortly")
    if path in access.OPEN:
        return
    facts.principal = _identify(request, deps)
    limit = request.app.get(RATE)
    if limit is not None:
        limit.take(facts.principal.name, deps.clock.monotonic())
    access.check(facts.principal, request.method, path)


def _identify(request: web.Request, deps: Deps) -> Principal:
    if deps.admits is not None and presented_token(request.headers) is None:
        principal = deps.admits(request)
        if principal is not None:
            return principal
    return authenticate(request.headers, deps.tokens)


def _refuse(deps: Deps, request: web.Request, path: str, facts: Facts, error: ReefError) -> web.StreamResponse:
    deps.metrics.refused.inc(code=error.code)
    # A probe that asks whether the service is ready yet is answered, not logged: start-up would fill the log.
    if (error.status >= 500 and path not in ("/healthz", "/readyz")) or isinstance(error, AuthError):
        _log.warning(
            "%s %s -> %d %s: %s",
            request.method,
            path,
            error.status,
            error.code,
            error.message,
            extra={"request_id": facts.request_id},
        )
    return error_response(error_dialect(path, request.headers), error, facts.request_id)


def _measure(deps: Deps, request: web.Request, response: web.StreamResponse, facts: Facts) -> None:
    resource = request.match_info.route.resource
    route = resource.canonical if resource is not None else "unknown"
    seconds = deps.clock.monotonic() - facts.started
    metrics = deps.metrics
    # Any word can be a method; only the usual ones become a label.
    method = request.method if request.method in ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS") else "other"
    metrics.requests.inc(route=route, method=method, status=str(response.status))
    if facts.dialect == "reef":
        metrics.request_seconds.observe(seconds, route=route)
    else:
        metrics.request_seconds.observe(seconds, route=route)
        metrics.overhead_seconds.observe(max(0.0, seconds - facts.upstream_s), route=route)
