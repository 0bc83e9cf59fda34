"""Binds each turn to the state that followed it, has it judged, and reports the judgement. One observer per scenario.

A turn waits until a later exchange of its session continues it; the last turn of a session never trains, nor do repeats and
side traffic (titles, compaction). Judging runs in tasks of its own, so serving and training never wait for a judge.
"""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from recipes.openclawrl.judge import Exchange, Judge, Opinion, texts
from reef_cli.core.errors import ReefError
from reef_cli.core.types import Inference, Report
from reef_cli.learning.contract import Seen, Tools, derived_id
from reef_cli.learning.samples import text_of

logger = logging.getLogger(__name__)

ATTEMPTS = 3
"""Times a judge that fails is asked; then the turn is reported without a vote."""

PAUSE_S = 5.0
ALARM = 50
"""Sessions without any bound turn after which the log says that histories do not match."""


class SessionObserver:
    """See the module; `name` is the recipe's, which its reports' ids are made of."""

    def __init__(
        self, name: str, scenario: str, judge: Judge, tools: Tools, *, ttl_s: float, concurrency: int, hints: int
    ) -> None:
        self._name = name
        self._scenario = scenario
        self._judge = judge
        self._tools = tools
        self._ttl_s = ttl_s
        self._hints = hints
        self._gate = asyncio.Semaphore(concurrency)
        self._waiting: dict[int, tuple[Inference, float]] = {}
        self._judging: dict[int, asyncio.Task[None]] = {}
        self._unbound = 0
        self._bound = 0

    async def observe(self, seen: Seen) -> None:
        """Bind what this exchange continues, and wait for what continues it."""
        if seen.role != "turn":
            return
        before = self._waiting.pop(seen.parent, None) if seen.parent is not None else None
        if before is not None:
            self._bound += 1
            self._judging[seen.parent or 0] = asyncio.create_task(self._report(seen.parent or 0, before[0], seen.record))
        elif seen.parent is None:
            self._alarm()
        if seen.record.complete:
            self._waiting[seen.sequence] = (seen.record, self._tools.clock.now())

    async def tick(self, now: float) -> None:
        """Turns whose session went quiet are no longer waited for."""
        for sequence in [key for key, (_, since) in self._waiting.items() if now - since > self._ttl_s]:
            del self._waiting[sequence]

    def pending(self) -> int | None:
        return min([*self._waiting, *self._judging], default=None)

    async def close(self) -> None:
        for task in self._judging.values():
            task.cancel()
        await asyncio.gather(*self._judging.values(), return_exceptions=True)

    async def _report(self, sequence: int, turn: Inference, following: Inference) -> None:
        try:
            exchange = bind(turn, following)
            opinion = Opinion(()) if exchange is None else await self._ask(exchange)
            hints = opinion.accepted(self._hints)
            metadata: dict[str, Any] = {
                "votes": list(opinion.votes),
                "hints": list(hints),
                "next_role": exchange.role if exchange else "",
                "next_receipt": following.id,
            }
            await self._tools.report(
                Report(
                    id=derived_id(self._name, [turn.id]),
                    scenario=self._scenario,
                    created_at=self._tools.clock.now(),
                    references=(turn.id,),
                    score=float(opinion.score),
                    metadata=metadata,
                )
            )
        finally:
            self._judging.pop(sequence, None)

    async def _ask(self, exchange: Exchange) -> Opinion:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                async with self._gate:
                    return await self._judge(exchange)
            except ReefError as error:
                logger.warning("judging a turn of %s failed (%d of %d): %s", self._scenario, attempt, ATTEMPTS, error)
                await asyncio.sleep(PAUSE_S if attempt < ATTEMPTS else 0)
        return Opinion(())

    def _alarm(self) -> None:
        """Sessions that only ever begin mean that clients rewrite their history, and nothing can be learned from them."""
        self._unbound += 1
        if self._unbound % ALARM == 0 and self._unbound > 10 * max(1, self._bound):
            logger.warning(
                "%d sessions began in %s, %d turns were followed by another: send x-reef-tag-session, or whole histories",
                self._unbound,
                self._scenario,
                self._bound,
            )


def bind(turn: Inference, following: Inference) -> Exchange | None:
    """The exchange a judge reads, or None when the later request has no state after the turn's answer."""
    new = list(following.messages)[len(turn.messages) :]
    state = [message for message in new if message.get("role") in ("user", "tool")]
    if not state:
        return None
    role = str(state[-1]["role"])
    said = texts([text_of(message) for message in state if message.get("role") == role])
    return Exchange(last_user(turn.messages), answer_of(turn.response), said, role)


def last_user(messages: Any) -> str:
    """The text of the last user message."""
    return next((text_of(message) for message in reversed(list(messages)) if message.get("role") == "user"), "")


def answer_of(response: Mapping[str, Any] | None) -> str:
    """An answer as a judge reads it: its text and the calls it made."""
    calls = (response or {}).get("tool_calls") or ()
    made = [f"{call.get('function', {}).get('name')}({call.get('function', {}).get('arguments')})" for call in calls]
    return texts([text_of(response), *made])
