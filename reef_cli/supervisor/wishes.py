"""The road of what people ask for in words and edit themselves into the queue of a recipe that evolves harnesses."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from reef_cli.core.clock import Clock
from reef_cli.core.ids import RecordId, new_id
from reef_cli.core.types import Report
from reef_cli.experience.log import ExperienceLog
from reef_cli.experience.model import Instruction
from reef_cli.harness.evolution import wish_mark
from reef_cli.harness.service import HarnessService
from reef_cli.learning.contract import derived_id
from reef_cli.learning.evolving import Kind


class Wishes:
    """What people ask for in words and edit themselves, on its way into the queue: as reports that cite nothing.

    Requests are found among the stored instructions, so that none is lost when the server dies; each becomes one report, since
    its id is made of the instruction's. Their mark says that they came through the routes made for them.
    """

    def __init__(
        self, log: ExperienceLog, service: HarnessService, recipe: str, clock: Clock, wake: Callable[[str], None]
    ) -> None:
        self._log = log
        self._service = service
        self._recipe = recipe
        self._clock = clock
        self._wake = wake
        self._seen: dict[str, int] = {}
        self._due: set[str] = set()
        self._event = asyncio.Event()

    def asked(self, scenario: str) -> None:
        """An instruction was stored, or a person wants a step now."""
        self._due.add(scenario)
        self._event.set()

    async def run(self) -> None:
        """Until cancelled: turn instructions into reports, first those that are there already; then ask for a step."""
        for row in self._log.scenarios.list():
            if await self._collect(row.name):
                self._wake(row.name)
        while True:
            await self._event.wait()
            self._event.clear()
            while self._due:
                scenario = self._due.pop()
                await self._collect(scenario)
                self._wake(scenario)

    async def edit(self, scenario: str, mutations: Any, base: str | None, reason: str, author: str) -> str:
        """Queue somebody's edit; returns the id of its report."""
        wish = {"kind": Kind.PROPOSAL, "text": reason, "mutations": mutations, "base_release_id": base, "origin": author}
        identity = new_id()
        await self._store(scenario, RecordId(identity), wish)
        self._wake(scenario)
        return identity

    async def _collect(self, scenario: str) -> bool:
        """Whether there was an instruction that had not become a report yet."""
        found = False
        while rows := self._log.page(scenario, self._seen.get(scenario, 0), 100, "train"):
            for row in rows:
                record = await asyncio.to_thread(self._log.get, scenario, row.id)
                if isinstance(record, Instruction):
                    wish = {"kind": Kind.REQUEST, "text": record.text, "origin": record.id}
                    found |= await self._store(scenario, derived_id(self._recipe, (record.id,)), wish)
                self._seen[scenario] = row.sequence
        return found

    async def _store(self, scenario: str, identity: RecordId, wish: Mapping[str, Any]) -> bool:
        """Store a wish unless it is there; whether it was new."""
        if await asyncio.to_thread(self._log.get, scenario, identity) is not None:
            return False
        feedback = {**wish, "mark": wish_mark(self._service, wish)}
        return await self._log.report(Report(identity, scenario, self._clock.now(), (), None, feedback))
