"""The HTTP application: all routes under one edge, and the helper that puts it on a socket and takes it off again.

`build_app(deps)` is everything but the socket. `serve` binds, `Server.drain` lets running requests finish while new ones get
503, `Server.close` ends. Knows no route by name; each module brings its own table.
"""

import asyncio
import contextlib
import errno
import signal
import socket
from dataclasses import dataclass

from reef_cli.core.errors import AlreadyRunning, ConfigError, InvalidRequest
from reef_cli.gateway.cors import allowing
from reef_cli.gateway.deps import Deps
from reef_cli.gateway.edge import Edge
from reef_cli.gateway.errors import error_response, new_request_id
from reef_cli.gateway.http import Listener, Response
from reef_cli.gateway.owner import port_owner
from reef_cli.gateway.router import Router
from reef_cli.gateway.routes import all_routes


def build_app(deps: Deps) -> Edge:
    """The application over given collaborators; it owns none of them and closes none."""
    return Edge(deps, Router((*all_routes(), *deps.extra_routes)))


@dataclass(slots=True)
class Server:
    """A listening application."""

    listener: Listener
    deps: Deps
    host: str
    port: int
    shutdown_timeout_s: float

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
        await self.listener.close(self.shutdown_timeout_s)


async def serve(app: Edge, host: str, port: int, *, shutdown_timeout_s: float = 5.0) -> Server:
    """Listen. Port 0 takes a free one. `AlreadyRunning` names who has the port; `ConfigError` for an address that cannot be."""
    deps = app.deps
    origins = frozenset(deps.settings.cors_origins)
    listener = Listener(app, _malformed, allowing(origins) if origins else None)
    try:
        bound = await listener.start(host, port)
    except OSError as error:
        raise _bind_error(error, host, port) from error
    with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
        # Only the main thread of a Unix process can take the signal; elsewhere the file is still looked at every second.
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, deps.tokens.reload)
    return Server(listener, deps, host, bound, shutdown_timeout_s)


def _malformed(text: str) -> Response:
    return error_response("reef", InvalidRequest(text), new_request_id())


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
