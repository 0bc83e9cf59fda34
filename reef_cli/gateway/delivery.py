"""How a streamed answer ends, however it ends: whole, broken by an error, or left by its client.

Whatever happens after the headers are out, the client gets the terminal frames of its dialect or its error frame, and the
record says what happened. Before the headers are out, errors are raised and become a real status.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace

from reef_cli.core.errors import ReefError, StorageError
from reef_cli.gateway.call import Call
from reef_cli.gateway.http import StreamResponse
from reef_cli.gateway.outgoing import ClientLeft, EventStream
from reef_cli.gateway.recording import CLIENT_LEFT, Outcome, cause, record, recordable

_log = logging.getLogger(__name__)


async def deliver(
    call: Call,
    stream: EventStream,
    work: Awaitable[None],
    partial: Callable[[], Outcome],
    fail: Callable[[ReefError], bytes],
) -> StreamResponse:
    """Run `work`, which sends everything including the terminal frames and records the whole answer.

    `partial` is what is known so far, for the record of a broken answer; `fail` writes the error frame.
    """
    try:
        await work
    except (asyncio.CancelledError, ClientLeft) as gone:
        stream.quiet()
        await keep(call, replace(partial(), error=CLIENT_LEFT))
        if isinstance(gone, asyncio.CancelledError):
            raise
    except ReefError as error:
        await _failed(call, stream, error, partial, fail)
    except Exception:
        if not stream.opened:
            raise
        # The edge of a stream: after a 200 nobody else can tell the client; the traceback goes to the log only.
        _log.exception("a streamed answer failed", extra={"request_id": call.context.request_id})
        await _failed(call, stream, ReefError("internal error"), partial, fail)
    return await stream.end()


async def _failed(
    call: Call, stream: EventStream, error: ReefError, partial: Callable[[], Outcome], fail: Callable[[ReefError], bytes]
) -> None:
    if not isinstance(error, StorageError) and (stream.opened or recordable(error)):
        await keep(call, replace(partial(), error=cause(error)))
    if not stream.opened:
        raise error
    stream.quiet()
    try:
        await stream.send(fail(error))
    except ClientLeft:
        _log.debug("the client left before its error frame", extra={"request_id": call.context.request_id})


async def keep(call: Call, outcome: Outcome) -> None:
    """Record a failure; when even that fails, the client's error goes first and the log says so."""
    try:
        await record(call, outcome)
    except StorageError as error:
        _log.error("a failed call could not be recorded: %s", error.message, extra={"request_id": call.context.request_id})


async def whole(call: Call, work: Awaitable[StreamResponse]) -> StreamResponse:
    """Run an unstreamed call; failures and departures are recorded and go on."""
    try:
        return await work
    except asyncio.CancelledError:
        await keep(call, Outcome(error=CLIENT_LEFT))
        raise
    except StorageError:
        raise
    except ReefError as error:
        if recordable(error):
            await keep(call, Outcome(error=cause(error)))
        raise
