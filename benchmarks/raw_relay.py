"""The least a process between two sockets does: read bytes, write them, know nothing of HTTP. On uvloop, as `reef serve` is.

What it takes for a streamed chunk is the system's share and the event loop's. Run: `python -m benchmarks.raw_relay URL`;
prints its port.
"""

import asyncio
import sys
from typing import cast
from urllib.parse import urlsplit

import uvloop


class _Up(asyncio.Protocol):
    """The side of the provider."""

    def __init__(self, down: "_Down") -> None:
        self.down = down

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.down.up = cast(asyncio.Transport, transport)
        self.down.up.write(self.down.early)

    def data_received(self, data: bytes) -> None:
        self.down.transport.write(data)

    def connection_lost(self, _: Exception | None) -> None:
        self.down.transport.close()


class _Down(asyncio.Protocol):
    """The side of a client; what it says before the provider is reached waits in `early`."""

    def __init__(self, host: str, port: int) -> None:
        self._address = host, port
        self.early = b""
        self.up: asyncio.Transport | None = None
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        loop = asyncio.get_running_loop()
        self._connecting = loop.create_task(loop.create_connection(lambda: _Up(self), *self._address))

    def data_received(self, data: bytes) -> None:
        if self.up is None:
            self.early += data
        else:
            self.up.write(data)

    def connection_lost(self, _: Exception | None) -> None:
        self._connecting.cancel()
        if self.up is not None:
            self.up.close()


async def serve(upstream: str) -> None:
    parts = urlsplit(upstream)
    host, port = parts.hostname or "127.0.0.1", parts.port or 80
    server = await asyncio.get_running_loop().create_server(lambda: _Down(host, port), "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(sys.argv[1]))
