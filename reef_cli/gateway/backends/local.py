"""Answers by the local engine: render, generate with the resolved release, read the tokens, answer in the client's dialect.

The record holds the tokens, log-probs and weight-version spans exactly as the engine emitted them. Several answers of one
request (`n`) are one exchange with one receipt: the first answer is the record's own, the others are listed in its usage.
Streams are true streams; only what could be the start of a tool call or reasoning tag waits.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from reef_cli.core.errors import ContextOverflow, EngineError
from reef_cli.core.ids import ReleaseId, split_weight_version
from reef_cli.core.ports import ChatTemplate, Completion, Delta, GenerateRequest, Serving
from reef_cli.core.types import Release, Surface
from reef_cli.gateway import dialects
from reef_cli.gateway.backends import plan as planning
from reef_cli.gateway.backends.fan import fan_in
from reef_cli.gateway.backends.history import History
from reef_cli.gateway.backends.live import LiveText
from reef_cli.gateway.backends.plan import Plan
from reef_cli.gateway.call import Call
from reef_cli.gateway.delivery import deliver, whole
from reef_cli.gateway.dialects import messages
from reef_cli.gateway.dialects.canonical import Answered, Piece, TokenScore
from reef_cli.gateway.http import Request, StreamResponse
from reef_cli.gateway.outgoing import EventStream, json_answer
from reef_cli.gateway.recording import Outcome, record

_GRACE_S = 1.0
"""How long a stream's headers wait for the first token: refusals come within milliseconds and get their real status."""


class Shadows(Protocol):
    """Takes whole answers, so that another release may answer the same once more, unseen by the client."""

    def offer(self, call: Call, request: GenerateRequest, completion: Completion) -> None:
        """Must return at once and raise nothing: the client waits."""
        ...


def engine_ids(receipt: str, count: int) -> list[str]:
    """What the engine calls the answers of one request. An engine ends all requests whose id begins with the one it is told to
    end (SGLang's `/abort_request`), so all have one length: none is the beginning of another."""
    width = len(str(count - 1))
    return [f"{receipt}-{number:0{width}d}" for number in range(count)]


class LocalBackend:
    """Implements `Backend` over a local engine. `model` is the served name; `context_length` caps the template's own."""

    def __init__(
        self,
        serving: Serving,
        chat: ChatTemplate,
        *,
        model: str,
        context_length: int | None = None,
        shadows: Shadows | None = None,
    ) -> None:
        self._serving = serving
        self._chat = chat
        self._model = model
        self._shadows = shadows
        self._history = History(chat)
        self._context_length = min(context_length or chat.context_length, chat.context_length)

    async def serve(self, call: Call) -> StreamResponse:
        request = dialects.parse(call.dialect, call.body)
        plan = planning.plan(request, self._chat, self._history, self._context_length)
        unheard = (request.called("reasoning_effort"),) if request.options.reasoning_effort else ()
        call.context.leave_out((*request.left_out, *unheard))
        if not request.stream:
            return await whole(call, self._whole(call, plan))
        return await _Streaming(self, call, plan).run()

    async def count_tokens(self, _request: Request, _raw: bytes, body: Mapping[str, Any], /) -> StreamResponse:
        parsed = messages.parse(body)
        return json_answer({"input_tokens": len(self._chat.render(parsed.messages, parsed.tools))}, {})

    async def models(self) -> Sequence[str]:
        return [self._model]

    async def close(self) -> None:
        """The engine belongs to the supervisor."""

    async def _whole(self, call: Call, plan: Plan) -> StreamResponse:
        started = call.deps.clock.monotonic()
        completions = await self.generate(call, plan)
        call.context.waited(call.deps.clock.monotonic() - started)
        answers = [self.read(call, plan, completion) for completion in completions]
        outcome = self.outcome(call, plan, completions, answers)
        if completions[0].finish == "abort":
            raise EngineError("the engine aborted the answer")
        self.remember(call, plan, completions)
        await record(call, outcome, plan.request.messages)
        self.offer(call, plan, completions[0])
        body = dialects.encode(call.envelope(len(plan.prompt_ids)), plan.request, answers)
        return json_answer(body, call.headers(outcome.weight_version, outcome.release_id))

    def requests(self, call: Call, plan: Plan) -> list[GenerateRequest]:
        release = served_weights(call.release)
        rids = engine_ids(call.context.receipt, plan.request.options.n)
        return [
            GenerateRequest(plan.prompt_ids, sampling, release, rid, pinned=call.context.pin is not None)
            for rid, sampling in zip(rids, plan.samplings(), strict=True)
        ]

    async def generate(self, call: Call, plan: Plan) -> list[Completion]:
        """All answers; when one fails the others are aborted."""
        requests = self.requests(call, plan)
        try:
            if len(requests) == 1:
                return [await self._serving.generate(requests[0])]
            tasks = [asyncio.ensure_future(self._serving.generate(request)) for request in requests]
            try:
                return list(await asyncio.gather(*tasks))
            finally:
                for task in tasks:
                    task.cancel()
        except ContextOverflow as error:
            raise planning.reworded(error, plan, self._context_length) from error

    def stream(self, call: Call, plan: Plan) -> AsyncIterator[tuple[int, Delta]]:
        """Deltas of all answers, each with its number."""
        return fan_in([self._serving.stream(request) for request in self.requests(call, plan)])

    def read(self, call: Call, plan: Plan, completion: Completion) -> Answered:
        return planning.answered(plan, self._chat, completion, call.context.receipt)

    def live(self, plan: Plan, choice: int) -> LiveText:
        return planning.live(plan, self._chat, choice)

    def scored(self, tokens: Sequence[tuple[int, float]]) -> list[TokenScore]:
        return planning.scored(self._chat, tokens)

    def overflow(self, plan: Plan, error: ContextOverflow) -> ContextOverflow:
        return planning.reworded(error, plan, self._context_length)

    def outcome(self, call: Call, plan: Plan, completions: Sequence[Completion], answers: Sequence[Answered]) -> Outcome:
        """What the record holds of whole answers."""
        first = completions[0]
        return Outcome(
            release_id=made_by(call.release, first),
            answers=answers,
            tokens=planning.trace(plan, first),
            raw_text=self._chat.decode(first.output_ids, skip_special_tokens=False),
            weight_version=first.spans[-1].version if first.spans else None,
            extra=planning.training_facts(plan.sampling),
        )

    def remember(self, call: Call, plan: Plan, completions: Sequence[Completion]) -> None:
        """Keep the tokens for the next turn, unless nothing of the request is to be kept."""
        if plan.prompt is not None and call.receipt is not None:
            for completion in completions:
                self._history.remember(plan.prompt, completion.output_ids)

    def offer(self, call: Call, plan: Plan, completion: Completion) -> None:
        """Let a shadow answer the same, after the client."""
        if self._shadows is not None:
            self._shadows.offer(call, self.requests(call, plan)[0], completion)

    def version_of(self, release: Release) -> str | None:
        """The weight version a stream announces before its first token, where the engine can say."""
        weights = served_weights(release)
        return None if weights is None else self._serving.version_of(weights)


def made_by(release: Release, completion: Completion) -> ReleaseId:
    """The release whose weights made the last token; it differs from the resolved one when weights were pushed meanwhile."""
    named = split_weight_version(completion.spans[-1].version) if completion.spans else None
    return ReleaseId(named[1]) if named is not None and named[0] == release.scenario else release.release_id


def changes(release: Release, completion: Completion) -> dict[str, Any]:
    """What a stream's end must correct of its head: other weights, or several."""
    maker = made_by(release, completion)
    if maker == release.release_id and len(completion.spans) <= 1:
        return {}
    spans = [{"version": span.version, "start": span.start, "end": span.end} for span in completion.spans]
    return {"release_id": maker, "weight_versions": spans}


def served_weights(release: Release) -> Release | None:
    """The release whose weights the engine runs; a harness or routing release changes none."""
    return release if release.surface is Surface.WEIGHTS else None


@dataclass
class _Streaming:
    """One streamed answer of a local engine, from first delta to terminal frames."""

    backend: LocalBackend
    call: Call
    plan: Plan
    completions: dict[int, Completion] = field(default_factory=dict)
    lives: dict[int, LiveText] = field(default_factory=dict)
    unscored: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    first_s: float | None = None

    async def run(self) -> StreamResponse:
        call = self.call
        self.envelope = call.envelope(len(self.plan.prompt_ids))
        self.encoder = dialects.encoder(self.envelope, self.plan.request)
        headers = call.headers(self.backend.version_of(call.release))
        self.stream = EventStream(call.request, headers, call.deps.options.keep_alive_s, self.encoder.keepalive)
        return await deliver(call, self.stream, self._work(), self._partial, self.encoder.fail)

    async def _work(self) -> None:
        source = self.backend.stream(self.call, self.plan)
        try:
            await self._pump(source)
        except ContextOverflow as error:
            raise self.backend.overflow(self.plan, error) from error
        finally:
            # Closing the iterator is what aborts the request in the engine.
            await source.aclose()  # type: ignore[attr-defined]
        await self._finish()

    async def _pump(self, source: AsyncIterator[tuple[int, Delta]]) -> None:
        """Send deltas as they come. Headers wait a moment for the first one, so that early refusals keep their status."""
        clock = self.call.deps.clock
        pending = asyncio.ensure_future(_next(source))
        try:
            await asyncio.wait({pending}, timeout=_GRACE_S)
            if not (pending.done() and pending.exception()):
                await self.stream.open()
                await self.stream.send(self.encoder.begin())
            item = await pending
        finally:
            await _put_down(pending)
        self.first_s = clock.monotonic() - self.call.context.started
        while item is not None:
            await self._delta(*item)
            asked = clock.monotonic()
            item = await _next(source)
            self.call.context.waited(clock.monotonic() - asked)

    async def _delta(self, choice: int, delta: Delta) -> None:
        if delta.text:
            pieces = self._pieces(choice, delta.text)
            if self.plan.request.options.logprobs:
                pieces = self._scored(choice, delta, pieces)
            await self.stream.send(b"".join(self.encoder.push(piece) for piece in pieces))
        if delta.completion is not None:
            self.completions[choice] = delta.completion

    def _pieces(self, choice: int, text: str) -> Sequence[Piece]:
        if self.plan.request.prompt is not None:
            return [Piece("text", text, choice=choice)]
        live = self.lives.get(choice)
        if live is None:
            live = self.lives[choice] = self.backend.live(self.plan, choice)
        return live.feed(text)

    def _scored(self, choice: int, delta: Delta, pieces: Sequence[Piece]) -> Sequence[Piece]:
        """The pieces with the tokens so far on the last of them; they wait while no piece is certain."""
        waiting = self.unscored.setdefault(choice, [])
        waiting.extend(delta.tokens)
        if not pieces:
            return pieces
        self.unscored[choice] = []
        return [*pieces[:-1], pieces[-1]._replace(scores=self.backend.scored(waiting))]

    async def _finish(self) -> None:
        completions = [self.completions[choice] for choice in sorted(self.completions)]
        if len(completions) < self.plan.request.options.n or any(one.finish == "abort" for one in completions):
            raise EngineError("the engine aborted the answer")
        answers = [self.backend.read(self.call, self.plan, completion) for completion in completions]
        outcome = replace(self.backend.outcome(self.call, self.plan, completions, answers), first_s=self.first_s)
        self.envelope.more.update(changes(self.call.release, completions[0]))
        out: list[bytes] = []
        if self.plan.request.prompt is None:
            for choice, answer in enumerate(answers):
                live = self.lives.get(choice) or self.backend.live(self.plan, choice)
                out.extend(self.encoder.push(piece) for piece in live.rest(answer))
        await self.stream.send(b"".join(out))
        self.backend.remember(self.call, self.plan, completions)
        await record(self.call, outcome, self.plan.request.messages)
        await self.stream.send(self.encoder.finish(answers))
        self.backend.offer(self.call, self.plan, completions[0])

    def _partial(self) -> Outcome:
        """What was streamed before the answer broke: text without tokens, which cannot train."""
        live = self.lives.get(0)
        if live is None:
            return Outcome(first_s=self.first_s)
        answer = Answered(live.text or None, "abort", reasoning=live.reasoning or None)
        return Outcome(answers=[answer], raw_text=live.raw, first_s=self.first_s)


async def _next(source: AsyncIterator[tuple[int, Delta]]) -> tuple[int, Delta] | None:
    return await anext(source, None)


async def _put_down(task: "asyncio.Future[Any]") -> None:
    """Cancel a task that may still run and wait until it has let go of its iterator."""
    if not task.done():
        task.cancel()
        await asyncio.wait({task})
