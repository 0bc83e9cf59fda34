"""The upstream double in a thread of its own, for tests that block."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tests.doubles.upstream import Upstream, upstream


@contextmanager
def background_upstream() -> Iterator[Upstream]:
    """A running double; its answers may be changed between requests."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    holder = upstream()
    try:
        yield asyncio.run_coroutine_threadsafe(holder.__aenter__(), loop).result(10)
        asyncio.run_coroutine_threadsafe(holder.__aexit__(None, None, None), loop).result(10)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
