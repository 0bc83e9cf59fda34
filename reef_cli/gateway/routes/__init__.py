"""The routes, one module per noun. Each exports `ROUTES`: `(method, path, handler)` rows; inference brings its own table."""

from reef_cli.gateway.deps import Route


def all_routes() -> tuple[Route, ...]:
    """Every route of the gateway."""
    from reef_cli.gateway import inference
    from reef_cli.gateway.routes import (
        events,
        health,
        jobs,
        metrics,
        records,
        releases,
        reports,
        routing,
        scenarios,
        status,
        train,
    )

    modules = (health, status, scenarios, records, reports, train, jobs, releases, routing, events, metrics)
    return (*inference.ROUTES, *(route for module in modules for route in module.ROUTES))
