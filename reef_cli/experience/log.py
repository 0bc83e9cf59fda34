"""`ExperienceLog`: the room's one door. Opens the database, runs the writer, and answers every read from a snapshot.

Writes are coroutines that return once they are durable; reads are plain calls, usable from any thread, that never wait for the
writer. One process owns a database at a time; that lock is its caller's business.
"""

import asyncio
import logging
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from reef_cli.core.clock import Clock, SystemClock
from reef_cli.core.errors import InvalidRequest, StorageError
from reef_cli.core.ids import RecordId, new_id
from reef_cli.core.types import Eligibility, Inference, RecordKind, Report
from reef_cli.experience import events as event_stream
from reef_cli.experience import query, retention, sessions
from reef_cli.experience.chain import links
from reef_cli.experience.codec import Record
from reef_cli.experience.ingest import Ingest
from reef_cli.experience.model import Event, Instruction, RecordRow, Scenario, SessionRow, SessionTree
from reef_cli.experience.placing import Placing
from reef_cli.experience.readers import Readers
from reef_cli.experience.redaction import Hook, redact
from reef_cli.experience.reports import store_instruction, store_report
from reef_cli.experience.retention import Evicted, EvictedRow, Limits
from reef_cli.experience.scenarios import ScenarioRegistry, archived, by_name
from reef_cli.experience.schema import migrate
from reef_cli.experience.scores import Scored, scores_after
from reef_cli.experience.writer import Durability, Writer, connect, storage_error

T = TypeVar("T")
BATCH_LIMIT = 1000
log = logging.getLogger(__name__)


class ExperienceLog:
    """The experience of all scenarios. Make one with `open`."""

    def __init__(self, path: Path, connection: sqlite3.Connection, redactor: Hook | None, clock: Clock) -> None:
        self.path = path
        self.scenarios = ScenarioRegistry(connection, clock)
        self._redactor = redactor
        self._clock = clock
        self._readers = Readers(path)
        self._listeners: list[Callable[[], None]] = []
        self._listening = threading.Lock()
        self._ingest = Ingest(connection)
        self._writer = Writer(connection, self._ingest, self._notify)
        self.scenarios.attach(self._writer)

    @classmethod
    def open(
        cls, path: Path, *, durability: Durability = "process", redact: Hook | None = None, clock: Clock | None = None
    ) -> "ExperienceLog":
        """Open or make the database at `path`, bring its schema up to date, start the writer.

        Raises `StorageError` when the file cannot be used or was written by newer code.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.touch(mode=0o600)
            connection = connect(path, durability)
            migrate(connection, path)
            return cls(path, connection, redact, clock or SystemClock())
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise StorageError(f"{path} cannot be opened", why=error.strerror or str(error)) from error
        except sqlite3.Error as error:
            raise storage_error(error) or StorageError(f"{path} cannot be opened", why=str(error)) from error

    def close(self) -> None:
        """Commit what waits and close every connection. May be called twice."""
        self._writer.close()
        self._readers.close()

    # Writing

    async def append(self, record: Inference) -> None:
        """Store an exchange; durable when this returns. The same record again is no error.

        Raises `ScenarioNotFound`, `ContentConflict`, `InvalidRequest`, `StorageError`.
        """
        await self._writer.call(lambda _: self._append(record), guarded=False)

    async def report(self, report: Report) -> bool:
        """Store feedback; False when this very report is there already.

        Raises `InvalidReference` naming the first bad reference, `ContentConflict` when the id has other content (for ever,
        also after eviction), `InvalidRequest`, `ScenarioNotFound`, `StorageError`.
        """
        return await self._writer.call(lambda _: self._store(report))

    async def instruct(
        self,
        scenario: str,
        text: str,
        *,
        session: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        record_id: str | None = None,
    ) -> RecordId:
        """Store a person's instruction; returns its id. Idempotent by `record_id`."""
        identifier = RecordId(record_id or new_id())
        instruction = Instruction(identifier, scenario, self._clock.now(), text, session, metadata or {})
        await self._writer.call(lambda _: self._store(instruction))
        return identifier

    async def import_batch(self, records: Sequence[Record]) -> list[bool]:
        """Store 1 to 1000 records, all or none, in order; per record whether it was new.

        Raises what `append` and `report` raise, with nothing stored.
        """
        if not 0 < len(records) <= BATCH_LIMIT:
            raise InvalidRequest(f"a batch holds 1 to {BATCH_LIMIT} records, not {len(records)}")
        return await self._writer.call(lambda _: self._store_all(records))

    async def write(self, fn: Callable[[sqlite3.Connection], T]) -> T:
        """Run `fn` in the writer's transaction under its own savepoint; returns its value once that is durable.

        `fn` must touch nothing but the connection and must not end the transaction: it runs again when the disk failed
        under the group it was in.
        """
        return await self._writer.call(fn)

    async def retain(
        self, *, keep_bytes: int | None = None, keep_days: float | None = None, unconsumed: bool = False
    ) -> Evicted:
        """Drop bodies beyond the limits, oldest first, in small transactions; see `retention` for what may go.

        Returns what was dropped. `unconsumed` also drops what no recipe has settled.
        """
        limits, now, forget = Limits(keep_bytes, keep_days, unconsumed), self._clock.now(), self._ingest.forget
        records = reports = freed = after = 0
        more = keep_bytes is not None or keep_days is not None
        while more and (found := await asyncio.to_thread(self._evictable, limits, now, after)):
            done = await self.write(partial(retention.evict_step, limits=limits, now=now, found=found, forget=forget))
            records, freed, more, after = records + done.records, freed + done.freed_bytes, done.more, found[-1]
        more = records > 0
        while more:
            done = await self.write(partial(retention.evict_reports, now=now, forget=forget))
            reports, freed, more = reports + done.reports, freed + done.freed_bytes, done.more
        return Evicted(records, reports, freed, held=await asyncio.to_thread(self._held_back, limits, now))

    def _held_back(self, limits: Limits, now: float) -> bool:
        with self.read() as connection:
            return retention.beyond(connection, limits, now)

    def _evictable(self, limits: Limits, now: float, after: int) -> list[int]:
        with self.read() as connection:
            return retention.candidates(connection, limits, now, after)

    def _append(self, record: Inference) -> bool:
        scenario = self.scenarios.get(record.scenario)
        if self._redactor is not None:
            record = _as(Inference, redact(self._redactor, record))
        return self._ingest.append(record, scenario)

    def _store(self, record: Record) -> bool:
        if isinstance(record, Inference):
            return self._append(record)
        scenario = self.scenarios.get(record.scenario)
        if self._redactor is not None:
            record = redact(self._redactor, record)
        if isinstance(record, Report):
            return store_report(self._ingest, record, scenario)
        return store_instruction(self._ingest, _as(Instruction, record), scenario)

    def _store_all(self, records: Iterable[Record]) -> list[bool]:
        mark = self._ingest.mark()
        try:
            stored = [self._store(record) for record in records]
            self._ingest.settle()
            return stored
        except BaseException:
            # The savepoint undoes the rows of a refused batch; the working memory must not remember them either.
            self._ingest.undo(mark)
            raise

    # Reading

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """A read-only connection with its own snapshot, from a pool; usable from any thread."""
        with self._readers.read() as connection:
            yield connection

    def get(self, scenario: str, record_id: str) -> Record | None:
        """The whole record, byte for byte; None when there is none, or its bodies were evicted."""
        with self.read() as connection:
            return query.get(connection, scenario, record_id)

    def page(
        self, scenario: str, after_sequence: int = 0, limit: int = 100, kind: RecordKind | None = None, newest: bool = False
    ) -> list[RecordRow]:
        """Light rows in order of sequence; with `newest` the latest first. `limit` is 1 to 1000."""
        with self.read() as connection:
            return query.page(connection, scenario, after_sequence, limit, kind, newest)

    def references(self, receipts: Sequence[str]) -> list[Inference]:
        """The exchanges behind receipts, in the given order; what is unknown or evicted is left out."""
        with self.read() as connection:
            return query.references(connection, receipts)

    def scenario_of(self, receipt: str) -> str | None:
        """The live scenario a record belongs to, or None."""
        with self.read() as connection:
            return query.scenario_of(connection, receipt)

    def reports_after(self, scenario: str, sequence: int, limit: int = 100) -> list[tuple[int, Report]]:
        """Reports stored after a sequence, with their sequences, oldest first."""
        with self.read() as connection:
            return query.reports_after(connection, scenario, sequence, limit)

    def scores_after(self, scenario: str, sequence: int, asked_from: float, limit: int = 500) -> list[Scored]:
        """Scores stored after a sequence, with the answers they cite first, oldest first."""
        with self.read() as connection:
            return scores_after(connection, scenario, sequence, asked_from, limit)

    def eligibility(
        self, scenario: str, receipts: Sequence[str], *, recipe: str | None = None, needs_tokens: bool = True
    ) -> list[Eligibility]:
        """Per receipt whether it can (still) train, for reasons that hold for every recipe."""
        with self.read() as connection:
            return query.eligibility(connection, scenario, receipts, recipe=recipe, needs_tokens=needs_tokens)

    def counts(self, scenario: str) -> Mapping[str, int]:
        """`records`, `inferences`, `reports`, `instructions`, `incomplete`, `evicted`, `stored_bytes`, `naive_bytes`, and of
        the learning ledger `queued`, `reserved`, `consumed`, `dropped` with `dropped:<reason>`."""
        with self.read() as connection:
            return query.counts(connection, scenario)

    def evicted(self, scenario: str, after_sequence: int = 0, limit: int = 100) -> list[EvictedRow]:
        """What retention dropped, with time and reason, in order of sequence."""
        with self.read() as connection:
            return retention.evicted(connection, by_name(connection, scenario).row, after_sequence, limit)

    def archived(self) -> list[Scenario]:
        """Archived scenarios; their labels work as names in every read."""
        with self.read() as connection:
            return archived(connection)

    def sessions(self, scenario: str, limit: int = 100, before: str | None = None) -> list[SessionRow]:
        """Sessions, latest begun first; `before` names the last one already seen."""
        with self.read() as connection:
            return sessions.sessions(connection, scenario, limit, before)

    def session_tree(self, scenario: str, session: str) -> SessionTree:
        """A session's branches. Raises `RecordNotFound`."""
        with self.read() as connection:
            return sessions.session_tree(connection, scenario, session)

    def conversation(self, scenario: str, messages: Sequence[Mapping[str, Any]]) -> str | None:
        """The session that a request without a session's name continues, as its record will be placed; None for a new one."""
        with self.read() as connection:
            chain = links(messages, by_name(connection, scenario).row)
            return Placing(connection).conversation(messages, chain)

    def events(self, cursor: str | None, limit: int = 100, scenario: str | None = None) -> tuple[list[Event], str]:
        """Events after `cursor` (None: from the beginning) and the cursor to go on from; see `tip` for "from now on"."""
        with self.read() as connection:
            return event_stream.events(connection, cursor, limit, scenario)

    def tip(self) -> str:
        """The event cursor after everything there is now."""
        with self.read() as connection:
            return event_stream.tip(connection)

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Have `callback` called on the writer's thread after each commit; returns how to stop that. It must be quick."""
        with self._listening:
            self._listeners = [*self._listeners, callback]

        def stop() -> None:
            with self._listening:
                self._listeners = [listener for listener in self._listeners if listener is not callback]

        return stop

    def _notify(self) -> None:
        for listener in self._listeners:
            try:
                listener()
            # A listener is foreign code; its failure must not end the writer.
            except Exception:
                log.exception("a listener of the experience log failed")


def _as(kind: type[T], record: object) -> T:
    assert isinstance(record, kind)
    return record


__all__ = ["ExperienceLog", "Scenario"]
