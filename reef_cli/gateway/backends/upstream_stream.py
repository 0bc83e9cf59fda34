"""Streamed answers of a provider: passed through in one dialect, or translated into another.

Both wait for the provider's status line before the client's headers go out, so that refusals keep their status; when that takes
longer than a keep-alive's interval, headers and keep-alives go first and a refusal becomes the stream's error frame.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Protocol

from reef_cli.core.errors import ReefError
from reef_cli.gateway import dialects
from reef_cli.gateway.backends.asking import Asking, answers_of
from reef_cli.gateway.backends.provider import Refusal, broken, parsed, read_all, returned_headers
from reef_cli.gateway.backends.relay import Relay, announced, early_end, feed, keepalive
from reef_cli.gateway.backends.wire import Answer
from reef_cli.gateway.call import Call
from reef_cli.gateway.delivery import deliver
from reef_cli.gateway.dialects.assembly import StreamReader
from reef_cli.gateway.dialects.canonical import Answered, ChatRequest, StreamEncoder, pieces_of
from reef_cli.gateway.errors import stream_error
from reef_cli.gateway.http import StreamResponse
from reef_cli.gateway.outgoing import EventStream
from reef_cli.gateway.recording import Outcome, cause, record
from reef_cli.gateway.sse import Splitter

_LINGER_S = 0.05
"""How long a provider may take to close after its last frame and still have its connection used again."""


class Posting(Protocol):
    """Sends a call's request; see `UpstreamBackend.post`."""

    async def post(self, call: Call, asking: Asking) -> Answer: ...


class _Flow:
    """What both kinds of stream share: connecting with grace, reading chunks, ending with a record."""

    def __init__(self, call: Call, asking: Asking, backend: Posting) -> None:
        self.call = call
        self.asking = asking
        self._backend = backend
        self.reader: StreamReader = asking.ask.Reader()
        self.first_s: float | None = None
        self.stream = EventStream(call.request, call.headers(), call.deps.options.keep_alive_s, self.keepalive)

    def keepalive(self) -> bytes:
        raise NotImplementedError

    def fail(self, error: ReefError) -> bytes:
        raise NotImplementedError

    async def pump(self, response: Answer) -> None:
        raise NotImplementedError

    def partial(self) -> Outcome:
        raise NotImplementedError

    async def run(self) -> StreamResponse:
        return await deliver(self.call, self.stream, self._work(), self.partial, self.fail)

    async def _work(self) -> None:
        response = await self._connect()
        try:
            if response.content_type == "application/json":
                await self._unstreamed(response)
            else:
                await self.pump(response)
        finally:
            # Closing a connection that still brings bytes is what cancels the call upstream.
            response.close()

    async def _connect(self) -> Answer:
        pending = asyncio.ensure_future(self._backend.post(self.call, self.asking))
        try:
            await asyncio.wait({pending}, timeout=self.call.deps.options.keep_alive_s)
            if not pending.done():
                await self.stream.open()
                await self.stream.send(self.keepalive())
            response = await pending
        except Refusal as refusal:
            if not self.stream.opened:
                raise
            raise refusal.error() from refusal
        finally:
            if not pending.done():
                pending.cancel()
        if not self.stream.opened:
            self.announce(response)
            await self.stream.open()
        return response

    def announce(self, response: Answer) -> None:
        """Add what of the provider's headers the client may see."""

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around reading the provider's bytes: breaks surface as `UpstreamError` or `UpstreamTimeout`.

        All the time of a stream counts as waiting for the provider: a clock read per chunk would cost more than it tells.
        """
        clock = self.call.deps.clock
        began = clock.monotonic()
        try:
            yield
        except OSError as error:
            raise broken(error) from error
        finally:
            self.call.context.waited(clock.monotonic() - began)

    async def chunks(self, response: Answer) -> AsyncIterator[bytes]:
        """The provider's bytes as they come."""
        with self.waiting():
            while chunk := await response.chunk():
                if self.first_s is None:
                    self.first_s = self.call.deps.clock.monotonic() - self.call.context.started
                yield chunk

    async def _unstreamed(self, response: Answer) -> None:
        """The provider answered whole although a stream was asked for: the client gets its stream all the same."""
        answers = answers_of(self.asking, parsed(await read_all(response)))
        request = self.asking.translated or dialects.parse(self.call.dialect, self.call.body)
        encoder = dialects.encoder(self.call.envelope(), request)
        pieces = [encoder.push(piece) for choice, answer in enumerate(answers) for piece in pieces_of(answer, choice)]
        await self.stream.send(b"".join((encoder.begin(), *pieces)))
        await record(self.call, Outcome(answers), request.messages)
        await self.stream.send(encoder.finish(answers))


class PassThrough(_Flow):
    """One dialect on both sides: bytes go through `Relay`."""

    def __init__(self, call: Call, asking: Asking, backend: Posting) -> None:
        self.relay = Relay(call.dialect, asking.drop_usage)
        self._read = False
        self._late = b""
        super().__init__(call, asking, backend)

    def keepalive(self) -> bytes:
        return keepalive(self.call.dialect, self.call.context.receipt, self.relay)

    def fail(self, error: ReefError) -> bytes:
        response = announced(self.relay) if self.call.dialect == "responses" else None
        return stream_error(self.call.dialect, error, self.call.context.request_id, response=response)

    def announce(self, response: Answer) -> None:
        self.stream.add_headers(returned_headers(response))

    def partial(self) -> Outcome:
        answers = self._answers() if self.relay.collected else ()
        return Outcome(answers, first_s=self.first_s)

    def _answers(self) -> list[Answered]:
        if not self._read:
            self.relay.read(self.reader)
            self._read = True
        return self.reader.answers()

    async def pump(self, response: Answer) -> None:
        with self.waiting():
            while not (self.relay.held or response.spent):
                await response.forward(self._pass)
                await self.stream.send(self._late)
                self._late = b""
        if not self.relay.held:
            await self.stream.send(self.relay.end())
        if self.call.receipt is None and self.relay.held:
            await self.stream.send(self.relay.held)
            await _let_close(response)
            return
        answers = self._answers()
        if self.relay.held:
            await self._whole(answers)
            await _let_close(response)
        else:
            await self._cut(answers)

    def _pass(self, chunk: bytes) -> bool:
        """Send frames on while the client keeps up; else, and with the terminal frame, `pump` goes on."""
        if self.first_s is None:
            self.first_s = self.call.deps.clock.monotonic() - self.call.context.started
        ready = self.relay.feed(chunk)
        if not self.stream.send_now(ready):
            self._late = ready
            return False
        return not self.relay.held

    async def _whole(self, answers: list[Answered]) -> None:
        error = None if self.reader.error is None else cause(self.reader.error)
        await record(self.call, Outcome(answers, error=error, first_s=self.first_s))
        await self.stream.send(self.relay.last(self.reader, None if error else self.call.receipt))

    async def _cut(self, answers: list[Answered]) -> None:
        """The provider closed without its terminal frame. Clients that saw an end or an error already get no second one."""
        if self.reader.error is None and not self.reader.finished:
            raise early_end()
        await record(self.call, Outcome(answers, error=cause(self.reader.error or early_end()), first_s=self.first_s))


class Translation(_Flow):
    """Two dialects: the provider's events become pieces, the pieces the client's events."""

    def __init__(self, call: Call, asking: Asking, backend: Posting) -> None:
        assert asking.translated is not None, "a call in the provider's own dialect passes through"
        self.request: ChatRequest = asking.translated
        self.encoder: StreamEncoder = dialects.encoder(call.envelope(), self.request)
        super().__init__(call, asking, backend)

    def keepalive(self) -> bytes:
        return self.encoder.keepalive()

    def fail(self, error: ReefError) -> bytes:
        return self.encoder.fail(error)

    def partial(self) -> Outcome:
        return Outcome(self.reader.answers() if self.first_s is not None else (), first_s=self.first_s)

    async def pump(self, response: Answer) -> None:
        splitter = Splitter()
        await self.stream.send(self.encoder.begin())
        async for chunk in self.chunks(response):
            await self._push(splitter.feed(chunk))
            if self.reader.done:
                break
        else:
            await self._push(splitter.rest)
        if not (self.reader.done or self.reader.finished):
            raise early_end()
        answers = self.reader.answers()
        await record(self.call, Outcome(answers, first_s=self.first_s), self.request.messages)
        await self.stream.send(self.encoder.finish(answers))
        await _let_close(response)

    async def _push(self, ready: bytes) -> None:
        pieces = feed(self.reader, ready)
        await self.stream.send(b"".join(self.encoder.push(piece) for piece in pieces))
        if self.reader.error is not None:
            raise self.reader.error


async def _let_close(response: Answer) -> None:
    """Read to the end, which has usually arrived, so that the connection returns to the pool."""
    with contextlib.suppress(OSError):
        async with asyncio.timeout(_LINGER_S):
            while await response.chunk():
                pass
