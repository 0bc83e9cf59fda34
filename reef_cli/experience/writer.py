"""The one writer: a thread that owns the writing connection and commits in groups.

Whatever waits when a transaction begins goes into it; callers are told after the commit, so that what they were told is
durable: against a killed process (`process`, WAL with synchronous NORMAL) or against power loss (`power`, synchronous FULL, one
fsync per group). A unit that fails is undone alone. When the disk fails, the group is undone and each unit tried by itself, so
that exactly those units fail that cannot be stored; the writer goes on. Knows nothing of records.
"""

import asyncio
import logging
import queue
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from reef_cli.core.errors import Draining, StorageError

T = TypeVar("T")
Durability = Literal["process", "power"]

GROUP = 512
"""Units per transaction: beyond this the rate no longer rises, only the wait of the first unit."""
GATHER_S = 0.001
"""How long a group gathers at most, until it is as large as the last one. Where one unit came alone, the next never waits."""
FOLD = 32 << 20
FOLD_NOW = 256 << 20
"""Bytes of write-ahead log after which it is folded into the database: beside the writer, and before it goes on."""
_PAGE = 4096
_STORAGE_CODES = {
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_NOTADB,
}
log = logging.getLogger(__name__)


class Hooks(Protocol):
    """What the writer tells the owner of in-memory state that mirrors the database."""

    def settle(self) -> None:
        """Before work that may look at rows, or be undone alone: write what earlier work holds back."""

    def flush(self) -> None:
        """Before each commit."""

    def reset(self) -> None:
        """After each rollback of a whole transaction."""


class _Unit:
    """One piece of work, and the future that waits for it."""

    __slots__ = ("after", "error", "future", "guarded", "loop", "value", "work")

    def __init__(self, work: Callable[[sqlite3.Connection], Any], guarded: bool, after: Callable[[Any], None] | None) -> None:
        self.work = work
        self.guarded = guarded
        self.after = after
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self.loop.create_future()
        self.value: Any = None
        self.error: BaseException | None = None


def connect(path: Path, durability: Durability) -> sqlite3.Connection:
    """The writing connection: WAL, autocommit mode (transactions are explicit), usable from the writer's thread."""
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, cached_statements=256)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute(f"PRAGMA synchronous = {'FULL' if durability == 'power' else 'NORMAL'}")
    connection.execute("PRAGMA busy_timeout = 10000")
    connection.execute("PRAGMA wal_autocheckpoint = 0")
    connection.execute("PRAGMA journal_size_limit = 67108864")
    connection.execute("PRAGMA cache_size = -4096")
    connection.execute("PRAGMA temp_store = MEMORY")
    return connection


def storage_error(error: sqlite3.Error) -> StorageError | None:
    """The typed form of a failure of disk or database file; None for mistakes of a statement."""
    code = getattr(error, "sqlite_errorcode", None)
    if code is None or code & 0xFF not in _STORAGE_CODES:
        return None
    full = code & 0xFF == sqlite3.SQLITE_FULL
    return StorageError(
        "the disk is full, so the record was not stored" if full else "the experience database could not be written",
        why=str(error),
        hint="free disk space, or set storage.keep_bytes" if full else "check the disk and the permissions of the home folder",
    )


class Writer:
    """The thread, its queue and its connection (which it closes)."""

    def __init__(self, connection: sqlite3.Connection, hooks: Hooks, committed: Callable[[], None]) -> None:
        self._connection = connection
        self._hooks = hooks
        self._committed = committed
        self._queue: queue.SimpleQueue[list[_Unit] | None] = queue.SimpleQueue()
        self._coming: dict[asyncio.AbstractEventLoop, list[_Unit]] = {}
        self._gate = threading.Lock()
        self._closed = False
        self._crowd = 1
        """Units of the last group."""
        self._folding: threading.Thread | None = None
        self._folded = self._written()
        self._thread = threading.Thread(target=self._run, name="experience-writer", daemon=True)
        self._thread.start()

    async def call(
        self, work: Callable[[sqlite3.Connection], T], *, guarded: bool = True, after: Callable[[T], None] | None = None
    ) -> T:
        """Run `work` in the next transaction; returns its value once that is durable, or raises what it raised.

        `guarded` undoes the work alone when it raises; leave it off only for work that cannot raise after its first write.
        `after` runs on the writer's thread right after the commit. Work must touch nothing but the connection: it runs
        again when the disk failed under its group.
        """
        unit = _Unit(work, guarded, after)
        with self._gate:
            if self._closed:
                raise Draining("the experience log is closed", hint="the server is shutting down; try again later")
            self._gather(unit)
        value: T = await unit.future
        return value

    def _gather(self, unit: _Unit) -> None:
        """Units go over together: each hand-over wakes the writer, which takes the interpreter from the loop, and a transaction
        of one row costs thrice its share of one of eight."""
        loop = unit.loop
        units = self._coming.setdefault(loop, [])
        units.append(unit)
        if self._crowd > 1:
            if len(units) >= self._crowd:
                self._coming.pop(loop)
                self._queue.put(units)
            elif len(units) == 1:
                loop.call_later(GATHER_S, self._hand_over, loop, units)
        elif len(units) == 1:
            loop.call_soon(self._hand_over, loop, units)

    def _hand_over(self, loop: asyncio.AbstractEventLoop, units: list[_Unit]) -> None:
        with self._gate:
            if self._coming.get(loop) is units:
                self._coming.pop(loop)
                self._queue.put(units)

    def close(self) -> None:
        """Commit what waits, fold the write-ahead log into the database, end the thread."""
        with self._gate:
            if self._closed:
                return
            self._closed = True
            for units in self._coming.values():
                self._queue.put(units)
            self._coming.clear()
            self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        running = True
        while running:
            units: list[_Unit] = []
            running = self._collect(units)
            self._crowd = min(max(len(units), 1), GROUP)
            if units:
                self._commit(units)
                self._deliver(units)
                # Dropped now: the next wait may be long, and units hold whole bodies.
                units.clear()
            try:
                self._fold()
            except (sqlite3.Error, RuntimeError) as error:
                # A disk that fails, or no thread to be had: the next group tries again.
                log.warning("the write-ahead log was not folded in: %s", error)
        if self._folding is not None:
            self._folding.join()
        try:
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        except sqlite3.Error as error:
            log.warning("the write-ahead log stays beside the database: %s", error)
        self._connection.close()

    def _collect(self, units: list[_Unit]) -> bool:
        """Wait for work, then take all that is there; False when the writer is to end after it."""
        more = self._queue.get()
        while more is not None:
            units += more
            if len(units) >= GROUP:
                return True
            try:
                more = self._queue.get_nowait()
            except queue.Empty:
                return True
        return False

    def _commit(self, units: list[_Unit]) -> None:
        try:
            self._transaction(units)
        # Whatever it is concerns those units alone whose work brings it; the thread goes on for all others.
        except Exception as error:
            if len(units) == 1:
                units[0].error = (storage_error(error) if isinstance(error, sqlite3.Error) else None) or error
                return
            for unit in units:
                unit.value = unit.error = None
                self._commit([unit])

    def _transaction(self, units: list[_Unit]) -> None:
        connection = self._connection
        try:
            connection.execute("BEGIN IMMEDIATE")
            for unit in units:
                self._perform(unit)
            self._hooks.flush()
            connection.execute("COMMIT")
        except Exception:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            self._hooks.reset()
            raise

    def _perform(self, unit: _Unit) -> None:
        connection = self._connection
        if unit.guarded:
            self._hooks.settle()
            connection.execute("SAVEPOINT unit")
        try:
            unit.value = unit.work(connection)
        # The work belongs to its caller, who gets whatever it raised; only a failing disk concerns the whole group.
        except Exception as error:
            if isinstance(error, sqlite3.Error) and (not unit.guarded or storage_error(error) is not None):
                raise
            unit.error = error
            if unit.guarded:
                connection.execute("ROLLBACK TO unit")
        if unit.guarded:
            connection.execute("RELEASE unit")

    def _deliver(self, units: list[_Unit]) -> None:
        waiting: dict[asyncio.AbstractEventLoop, list[_Unit]] = {}
        for unit in units:
            if unit.after is not None and unit.error is None:
                unit.after(unit.value)
            waiting.setdefault(unit.loop, []).append(unit)
        for loop, batch in waiting.items():
            try:
                loop.call_soon_threadsafe(_settle, batch)
            except RuntimeError:
                # The loop is closed: nobody waits any more, and the records are durable all the same.
                continue
        if any(unit.error is None for unit in units):
            self._committed()

    def _written(self) -> tuple[int, int]:
        """Rows changed and pages there are: each says how much the write-ahead log has grown, for small rows and for large."""
        return self._connection.total_changes, int(self._connection.execute("PRAGMA page_count").fetchone()[0])

    def _fold(self) -> None:
        """Fold a long write-ahead log in on a thread of its own, since that takes a while; what came meanwhile is then little.

        The last of it is folded here, where nothing is written meanwhile: only then does the log begin anew.
        """
        changes, pages = self._written()
        grown = _PAGE * max(changes - self._folded[0], pages - self._folded[1])
        if grown < FOLD or (self._folding is not None and self._folding.is_alive() and grown < FOLD_NOW):
            return
        if self._folding is None:
            (_, _, file), *_ = self._connection.execute("PRAGMA database_list")
            self._folding = threading.Thread(target=_fold_beside, args=(file,), name="experience-fold", daemon=True)
            self._folding.start()
            return
        self._folding.join()
        self._folding, self._folded = None, (changes, pages)
        _checkpoint(self._connection)


def _fold_beside(file: str) -> None:
    """Fold in what the write-ahead log holds now, through a connection of its own: the writer is not kept waiting by it."""
    try:
        with closing(sqlite3.connect(file, isolation_level=None)) as connection:
            connection.execute("PRAGMA cache_size = -64")
            _checkpoint(connection)
    except sqlite3.Error as error:
        log.warning("the write-ahead log could not be folded in beside the writer: %s", error)


def _checkpoint(connection: sqlite3.Connection) -> None:
    try:
        connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
    except sqlite3.Error as error:
        log.warning("the write-ahead log could not be folded in: %s", error)


def _settle(units: list[_Unit]) -> None:
    """On the callers' loop: one wake-up for the whole group."""
    for unit in units:
        if unit.future.done():
            continue
        if unit.error is not None:
            unit.future.set_exception(unit.error)
        else:
            unit.future.set_result(unit.value)
