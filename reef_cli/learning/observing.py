"""Feeds the stream of exchanges to a recipe that derives reports from it, scenario by scenario, beside serving and training.

Where a scenario's observer is in the stream is written down behind what it still needs, so a restart shows those exchanges
again; what it reports is recognised by its id and stored once. Knows nothing of judges or hints.
"""

import asyncio
import logging
from collections.abc import Sequence

from reef_cli.core.errors import ContentConflict, InvalidReference, ReefError
from reef_cli.core.types import Inference, Report
from reef_cli.experience.log import ExperienceLog
from reef_cli.experience.model import RecordRow
from reef_cli.learning import jobs
from reef_cli.learning.contract import Deriving, Observer, Seen, Tools

logger = logging.getLogger(__name__)

PAGE = 64
"""Exchanges read from the log at a time; they come with their bodies."""

TICK_S = 1.0


class Observing:
    """One observer per scenario, made when its first exchange is seen."""

    def __init__(self, log: ExperienceLog, recipe: Deriving, tools: Tools) -> None:
        self._log = log
        self._recipe = recipe
        self._name = str(getattr(recipe, "name", type(recipe).__name__))
        self._tools = Tools(tools.template, tools.answering, tools.clock, self._store)
        self._observers: dict[str, Observer] = {}
        self._read: dict[str, int] = {}
        self._kept: dict[str, int] = {}
        self._wake = asyncio.Event()

    def wake(self) -> None:
        """New exchanges are visible."""
        self._wake.set()

    async def run(self) -> None:
        """Until cancelled. A failing pass is logged and tried again; at the end every observer is closed."""
        try:
            while True:
                self._wake.clear()
                await self.turn()
                try:
                    async with asyncio.timeout(TICK_S):
                        await self._wake.wait()
                except TimeoutError:
                    continue
        finally:
            for observer in self._observers.values():
                await observer.close()

    async def turn(self) -> None:
        """Show every scenario's observer what is new, and the time."""
        for scenario in [row.name for row in self._log.scenarios.list()]:
            try:
                await self._advance(scenario)
            except ReefError as error:
                logger.warning("observing %s failed: %s", scenario, error)

    async def _advance(self, scenario: str) -> None:
        observer = self._observers.get(scenario)
        if observer is None:
            with self._log.read() as connection:
                self._read[scenario] = self._kept[scenario] = jobs.observed(connection, scenario, self._name)
            observer = self._observers[scenario] = self._recipe.observer(scenario, self._tools)
        while rows := await asyncio.to_thread(self._log.page, scenario, self._read[scenario], PAGE, "inference"):
            for seen in await asyncio.to_thread(self._whole, rows):
                await observer.observe(seen)
            self._read[scenario] = rows[-1].sequence
        await observer.tick(self._tools.clock.now())
        await self._keep(scenario, observer)

    def _whole(self, rows: Sequence[RecordRow]) -> list[Seen]:
        """The exchanges behind light rows, in order; evicted ones are left out."""
        records: dict[str, Inference] = {record.id: record for record in self._log.references([row.id for row in rows])}
        return [Seen(row.sequence, records[row.id], row.session, row.parent, row.role) for row in rows if row.id in records]

    async def _keep(self, scenario: str, observer: Observer) -> None:
        """Write down how far nothing is needed any more."""
        pending = observer.pending()
        settled = self._read[scenario] if pending is None else min(pending - 1, self._read[scenario])
        if settled > self._kept[scenario]:
            await self._log.write(lambda c: jobs.set_observed(c, scenario, self._name, settled))
            self._kept[scenario] = settled

    async def _store(self, report: Report) -> bool:
        """Store a derived report; one with this id that says something else stands, and a receipt may be gone."""
        try:
            return await self._log.report(report)
        except (ContentConflict, InvalidReference):
            return False
