"""The HTTP application: all routes under one edge, and the helper that puts it on a socket and takes it off again.

`build_app(deps)` is everything but the socket, which is what tests use. `serve` binds, `Server.drain` lets running requests
finish while new ones get 503, `Server.close` ends. Knows no route by name; each module brings its own table.
"""

import asyncio
import contextlib
import errno
import signal
import socket
import warnings
from collections.abc import Iterable
from dataclasses import dataclass

from aiohttp import web

from reef_cli.core.errors import AlreadyRunning, ConfigError
from reef_cli.gateway import wire
from reef_cli.gateway.cors import allowing
from reef_cli.gateway.deps import DEPS, Deps, Route
from reef_cli.gateway.edge import RATE, edge
from reef_cli.gateway.limits import RateLimit
from reef_cli.gateway.owner import port_owner
from reef_cli.gateway.router import TolerantRouter
from reef_cli.gateway.routes import all_routes


def build_app(deps: Deps) -> web.Application:
    """The application over given collaborators; it owns none of them and closes none."""
    handler_args = {
        # Bodies are decompressed by `gateway.bodies`, which bounds what comes out.
        "auto_decompress": False,
        # When a client leaves, its handler is cancelled at once, and with it the call upstream.
        "handler_cancellation": True,
        "access_log": None,
    }
    with warnings.catch_warnings():
        # A router of one's own is the only public way to match a cleaned path; aiohttp 3 warns, and still supports it.
        warnings.simplefilter("ignore", DeprecationWarning)
        app = web.Application(
            router=TolerantRouter(),
            middlewares=[edge],
            client_max_size=deps.settings.body_limit_bytes,
            handler_args=handler_args,
        )
    app[DEPS] = deps
    if deps.settings.rate_per_s is not None:
        app[RATE] = RateLimit(deps.settings.rate_per_s)
    if deps.settings.cors_origins:
        app.on_response_prepare.append(allowing(frozenset(deps.settings.cors_origins)))
    mount(app, (*all_routes(), *deps.extra_routes))
    return app


def mount(app: web.Application, routes: Iterable[Route]) -> None:
    """Add rows of `(method, path, handler)`."""
    for method, path, handler in routes:
        if method == "GET":
            route = app.router.add_get(path, handler, allow_head=True)
        else:
            route = app.router.add_route(method, path, handler)
        if isinstance(app.router, TolerantRouter):
            app.router.know(route)


@dataclass(slots=True)
class Server:
    """A listening application."""

    runner: web.AppRunner
    deps: Deps
    host: str
    port: int

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    async def drain(self, timeout: float | None = None) -> bool:
        """Refuse new requests and wait for the running ones; False when some still ran after `timeout` seconds."""
        self.deps.draining.start()
        return await self.deps.draining.idle(timeout)

    async def close(self) -> None:
        """Stop listening and cancel what still runs."""
        self.deps.draining.start()
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)
        await self.runner.cleanup()


async def serve(app: web.Application, host: str, port: int, *, shutdown_timeout_s: float = 5.0) -> Server:
    """Listen. Port 0 takes a free one. `AlreadyRunning` names who has the port; `ConfigError` for an address that cannot be."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=shutdown_timeout_s, logger=wire.logger)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port, backlog=1024).start()
    except OSError as error:
        await runner.cleanup()
        raise _bind_error(error, host, port) from error
    deps = app[DEPS]
    with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
        # Only the main thread of a Unix process can take the signal; elsewhere the file is still looked at every second.
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, deps.tokens.reload)
    return Server(runner, deps, host, int(runner.addresses[0][1]))


def _bind_error(error: OSError, host: str, port: int) -> AlreadyRunning | ConfigError:
    if error.errno == errno.EADDRINUSE:
        owner = port_owner(port)
        return AlreadyRunning(
            f"port {port} on {host} is taken" + (f" by {owner}" if owner else ""),
            hint="stop that program, or choose another port: --reef.port 8901",
            port=port,
        )
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return ConfigError(f"{host!r} is no address of this machine", hint="set reef.host to 127.0.0.1 or a local address")
    return ConfigError(
        f"cannot listen on {host}:{port}", why=error.strerror or str(error), hint="choose another port: --reef.port 8901"
    )
