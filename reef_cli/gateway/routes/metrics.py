"""`GET /metrics`: the Prometheus exposition. What is counted elsewhere is read just before each scrape."""

import asyncio

from reef_cli import __version__
from reef_cli.core.errors import EngineUnavailable, RouteNotFound
from reef_cli.gateway.deps import Deps, Route, deps_of
from reef_cli.gateway.http import Request, Response
from reef_cli.telemetry.metrics import CONTENT_TYPE


async def metrics(request: Request) -> Response:
    """All metrics as text."""
    deps = deps_of(request)
    if not deps.metrics_on:
        raise RouteNotFound("metrics are switched off", hint="set telemetry.metrics: true")
    fill_gateway(deps)
    text = await asyncio.to_thread(_expose, deps)
    return Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE})


def fill_gateway(deps: Deps) -> None:
    """Gauges the gateway itself knows; runs on the event loop."""
    gauges = deps.metrics
    gauges.running.set(deps.draining.running)
    gauges.draining.set(1 if deps.draining.active else 0)
    gauges.info.set(1, version=__version__, engine=deps.engine_kind, model=deps.model)
    gauges.release_info.clear()
    gauges.release_step.clear()
    for scenario in deps.log.scenarios.list():
        try:
            release = deps.publishing.served(scenario.name)
        except EngineUnavailable:
            continue  # It has not been opened since the start; nothing of it is served.
        gauges.release_info.set(1, scenario=scenario.name, release_id=release.release_id, content_id=release.content_id)
        gauges.release_step.set(release.step, scenario=scenario.name)


def _expose(deps: Deps) -> str:
    """Queue and age gauges come from the database, in a thread, then the text."""
    gauges = deps.metrics
    now = deps.clock.now()
    with deps.log.read() as connection:
        queued = connection.execute(
            "SELECT scenario, count(*) FROM sample_state WHERE state = 'queued' GROUP BY scenario"
        ).fetchall()
        unread = connection.execute(_OLDEST_UNREAD).fetchall()
    gauges.queue.clear()
    gauges.oldest_unread.clear()
    for scenario in deps.log.scenarios.list():
        gauges.queue.set(0, scenario=scenario.name)
        gauges.oldest_unread.set(0, scenario=scenario.name)
    for name, count in queued:
        gauges.queue.set(count, scenario=name)
    for name, oldest in unread:
        gauges.oldest_unread.set(max(0.0, now - oldest), scenario=name)
    return gauges.expose()


# Reports the learning worker has given no fate yet, per live scenario.
_OLDEST_UNREAD = """
    SELECT s.name, min(r.created_at) FROM records r JOIN scenarios s ON s.id = r.scenario_id
    WHERE r.kind = 'report' AND s.archived_at IS NULL
      AND r.seq > coalesce((SELECT max(q.sequence) FROM sample_state q WHERE q.scenario = s.name), 0)
    GROUP BY s.name
"""

ROUTES: tuple[Route, ...] = (("GET", "/metrics", metrics),)
