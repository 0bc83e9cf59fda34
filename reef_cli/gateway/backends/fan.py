"""Several streams as one, each item with the number of the stream it came from."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from reef_cli.core.ports import Delta

_Item = tuple[int, Delta | BaseException | None]


async def fan_in(streams: Sequence[AsyncIterator[Delta]]) -> AsyncIterator[tuple[int, Delta]]:
    """Items as they come. The first error of any stream is raised; closing this closes them all."""
    if len(streams) == 1:
        try:
            async for delta in streams[0]:
                yield 0, delta
        finally:
            await _close(streams[0])
        return
    queue: asyncio.Queue[_Item] = asyncio.Queue()
    tasks = [asyncio.create_task(_read(number, stream, queue)) for number, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            number, item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield number, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _read(number: int, stream: AsyncIterator[Delta], queue: "asyncio.Queue[_Item]") -> None:
    try:
        async for delta in stream:
            queue.put_nowait((number, delta))
        queue.put_nowait((number, None))
    except Exception as error:
        # Not handled here: carried to the reader of all streams, which raises it.
        queue.put_nowait((number, error))
    finally:
        await _close(stream)


async def _close(stream: AsyncIterator[Delta]) -> None:
    close = getattr(stream, "aclose", None)
    if close is not None:
        await close()
