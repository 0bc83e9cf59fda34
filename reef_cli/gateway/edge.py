"""The outermost layer of every request: id, authentication, rate, draining, errors, metrics, and one log line for failures.

One layer instead of a stack, because each costs every request. It never reads a body and never logs one. Whatever goes wrong
inside, the client gets an error of the closed list in the dialect of the path, never a traceback.
"""

import asyncio
import logging

from reef_cli.core.errors import AuthError, Draining, ReefError
from reef_cli.gateway import access
from reef_cli.gateway.auth import Principal, authenticate, presented_token
from reef_cli.gateway.context import Facts, split_scenario_path
from reef_cli.gateway.cors import preflight
from reef_cli.gateway.deps import Deps
from reef_cli.gateway.errors import error_dialect, error_response, request_id_of
from reef_cli.gateway.http import Handler, Request, StreamResponse
from reef_cli.gateway.limits import RateLimit
from reef_cli.gateway.router import Router, merge_slashes
from reef_cli.gateway.tracing import answered

UNCOUNTED = frozenset({"/reef/events"})
_METHODS = frozenset({"GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS"})
_log = logging.getLogger(__name__)


def canonical_path(request: Request) -> str:
    """The path without a scenario prefix and doubled slashes."""
    raw = request.path
    return raw if "//" not in raw and not raw.startswith("/s/") else merge_slashes(split_scenario_path(raw)[1])


class Edge:
    """The application: answers every request, and raises only what says that its client has gone."""

    def __init__(self, deps: Deps, router: Router) -> None:
        self.deps = deps
        self.router = router
        rate = deps.settings.rate_per_s
        self._limit = None if rate is None else RateLimit(rate)

    async def __call__(self, request: Request) -> StreamResponse:
        deps = request.deps = self.deps
        path = canonical_path(request)
        headers = request.headers
        facts = request.facts = Facts(request_id_of(headers), deps.clock.monotonic(), error_dialect(path, headers))
        handler = self.router.find(request)
        counted = path not in UNCOUNTED
        if counted:
            deps.draining.enter()
        try:
            if deps.tracer.on:
                with deps.tracer.span(headers) as span:
                    response = await self._guarded(request, handler, path, facts)
                    if span is not None:
                        answered(span, request, response, facts.request_id)
            else:
                response = await self._guarded(request, handler, path, facts)
        finally:
            if counted:
                deps.draining.leave()
        if not response.prepared:
            response.headers["x-request-id"] = facts.request_id
        _measure(deps, request, response, facts)
        return response

    async def _guarded(self, request: Request, handler: Handler, path: str, facts: Facts) -> StreamResponse:
        """The handler's answer, or the answer for what it raised."""
        try:
            if request.method == "OPTIONS" and (allowed := preflight(request, self.deps.settings.cors_origins)) is not None:
                return allowed
            self._admit(request, path, facts)
            return await handler(request)
        except asyncio.CancelledError:
            # The client left and the handler was cancelled and has cleaned up. Nobody is there to answer.
            raise
        except ReefError as error:
            return self._refuse(request, path, facts, error)
        except ConnectionError:
            # The client's connection broke while we read or wrote; that is the only thing that failed.
            raise
        except Exception:
            # The process edge: an unforeseen failure becomes one code, and its traceback goes to the log only.
            _log.exception("request failed", extra={"request_id": facts.request_id, "route": path})
            return self._refuse(request, path, facts, ReefError("internal error", hint="the server's log has the details"))

    def _admit(self, request: Request, path: str, facts: Facts) -> None:
        """Refuse what may not come in: while draining, without a valid token, beyond the rate, out of scope."""
        deps = self.deps
        if deps.draining.active and path not in access.ALIVE_WHILE_DRAINING:
            raise Draining("the server is shutting down, try again shortly")
        if path in access.OPEN:
            return
        principal = facts.principal = self._identify(request)
        if self._limit is not None:
            self._limit.take(principal.name, deps.clock.monotonic())
        access.check(principal, request.method, path)

    def _identify(self, request: Request) -> Principal:
        deps = self.deps
        if deps.admits is not None and presented_token(request.headers) is None:
            principal = deps.admits(request)
            if principal is not None:
                return principal
        return authenticate(request.headers, deps.tokens)

    def _refuse(self, request: Request, path: str, facts: Facts, error: ReefError) -> StreamResponse:
        self.deps.metrics.refused.inc(code=error.code)
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


def _measure(deps: Deps, request: Request, response: StreamResponse, facts: Facts) -> None:
    route = request.route or "unknown"
    seconds = deps.clock.monotonic() - facts.started
    metrics = deps.metrics
    # Any word can be a method; only the usual ones become a label.
    method = request.method if request.method in _METHODS else "other"
    metrics.requests.inc(1, route, method, str(response.status))
    metrics.request_seconds.observe(seconds, route)
    if facts.dialect != "reef":
        metrics.overhead_seconds.observe(max(0.0, seconds - facts.upstream_s), route)
