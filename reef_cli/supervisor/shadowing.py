"""Answers of a shadow: computed after the client has its own, kept beside its record, shown to people only.

The client never waits: an answer is only offered here when it is complete, and a shadow starts only while the engine has room
to spare, one at a time. Offers beyond a bounded queue are skipped and counted. What is kept is no experience: it has no
receipt, so nothing can cite it and it never trains.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from reef_cli.core.clock import Clock
from reef_cli.core.errors import ReefError
from reef_cli.core.ids import RecordId
from reef_cli.core.ports import Completion, GenerateRequest, Generation
from reef_cli.core.types import Release
from reef_cli.experience import shadows
from reef_cli.experience.log import ExperienceLog
from reef_cli.experience.shadows import ShadowAnswer
from reef_cli.gateway.call import Call
from reef_cli.supervisor.routes import Routes
from reef_cli.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

QUEUE = 64
ROOM_EVERY_S = 0.05


@dataclass(frozen=True, slots=True)
class Offer:
    """An answer a client got, and the request that led to it, aimed at the shadow."""

    record_id: RecordId
    answered: Release
    shadow: Release
    request: GenerateRequest
    output_ids: Sequence[int]


class ShadowAnswers:
    """Takes offers from the backend; `run` it as a task. `room` says whether the engine has seats that no client needs now."""

    def __init__(
        self,
        log: ExperienceLog,
        routes: Routes,
        generation: Generation,
        metrics: Metrics,
        clock: Clock,
        *,
        room: Callable[[], bool],
        keep_text: bool,
    ) -> None:
        self._log = log
        self._routes = routes
        self._generation = generation
        self._metrics = metrics
        self._clock = clock
        self._room = room
        self._keep_text = keep_text
        self._queue: asyncio.Queue[Offer] = asyncio.Queue(QUEUE)

    def offer(self, call: Call, request: GenerateRequest, completion: Completion) -> None:
        """A client has its answer. Returns at once."""
        shadow = self._routes.shadows(call.release, call.session)
        if shadow is None or not call.context.capture:
            return
        receipt = call.context.receipt
        aimed = replace(request, release=shadow, rid=f"{receipt}-shadow", pinned=True)
        try:
            self._queue.put_nowait(Offer(receipt, call.release, shadow, aimed, completion.output_ids))
        except asyncio.QueueFull:
            self._metrics.shadows.inc(scenario=shadow.scenario, result="skipped")

    async def run(self) -> None:
        while True:
            offer = await self._queue.get()
            while not self._room():  # noqa: ASYNC110 - the count of requests is the gateway's, and has no event
                await asyncio.sleep(ROOM_EVERY_S)
            answer = await self._answer(offer)
            self._metrics.shadows.inc(scenario=answer.scenario, result="failed" if answer.error else "answered")
            try:
                await self._log.write(lambda connection, kept=answer: shadows.store(connection, kept))  # type: ignore[misc]
            except ReefError as error:
                logger.warning("a shadow's answer could not be kept: %s", error.message)

    async def _answer(self, offer: Offer) -> ShadowAnswer:
        started = self._clock.monotonic()
        blank = ShadowAnswer(
            offer.shadow.scenario, offer.record_id, offer.answered.release_id, offer.shadow.release_id, self._clock.now()
        )
        try:
            completion = await self._generation.generate(offer.request)
        except ReefError as error:
            return replace(blank, error=f"{error.code}: {error.message}", seconds=self._clock.monotonic() - started)
        return replace(
            blank,
            text=completion.text[: shadows.TEXT_LIMIT] if self._keep_text else None,
            finish=completion.finish,
            output_tokens=len(completion.output_ids),
            agreement=agreement(offer.output_ids, completion.output_ids),
            seconds=self._clock.monotonic() - started,
        )


def agreement(a: Sequence[int], b: Sequence[int]) -> float:
    """The part of the longer answer that both began with; 1.0 for equal ones."""
    longest = max(len(a), len(b))
    same = next((index for index, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return same / longest if longest else 1.0
