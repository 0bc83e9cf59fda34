"""The single writer: groups, isolation of failures, a disk that fills up, closing."""

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reef_cli.core.errors import Draining, InvalidRequest, StorageError
from reef_cli.core.types import Inference
from reef_cli.experience.log import ExperienceLog
from reef_cli.experience.writer import Writer, _fold_beside, connect

Make = Callable[..., Inference]


class Recorder:
    """Hooks that count, so that tests see the transactions."""

    def __init__(self) -> None:
        self.commits = 0
        self.resets = 0
        self.told = 0

    def settle(self) -> None: ...

    def flush(self) -> None:
        self.commits += 1

    def reset(self) -> None:
        self.resets += 1

    def committed(self) -> None:
        self.told += 1


@pytest.fixture
def hooks() -> Recorder:
    return Recorder()


@pytest.fixture
def connection(tmp_path: Path) -> sqlite3.Connection:
    opened = connect(tmp_path / "x.db", "process")
    opened.execute("CREATE TABLE t (n INTEGER PRIMARY KEY, data BLOB)")
    return opened


def insert(number: int, size: int = 10) -> Callable[[sqlite3.Connection], int]:
    def work(connection: sqlite3.Connection) -> int:
        connection.execute("INSERT INTO t VALUES (?, zeroblob(?))", (number, size))
        return number

    return work


def rows(tmp_path: Path) -> list[int]:
    reader = sqlite3.connect(tmp_path / "x.db")
    found = [row[0] for row in reader.execute("SELECT n FROM t ORDER BY n")]
    reader.close()
    return found


async def test_what_waits_is_committed_together(connection: sqlite3.Connection, hooks: Recorder, tmp_path: Path) -> None:
    writer = Writer(connection, hooks, hooks.committed)
    gate = threading.Event()
    first = asyncio.ensure_future(writer.call(lambda _: gate.wait(5)))
    await asyncio.sleep(0.05)
    rest = [asyncio.ensure_future(writer.call(insert(n))) for n in range(100)]
    await asyncio.sleep(0)
    gate.set()
    assert await asyncio.gather(*rest) == list(range(100))
    await first
    assert hooks.commits == 2
    assert rows(tmp_path) == list(range(100))
    writer.close()


async def test_a_group_gathers_up_to_the_last_ones_size_and_never_for_one_caller(
    connection: sqlite3.Connection, hooks: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reef_cli.experience.writer.GATHER_S", 0.5)
    loop = asyncio.get_running_loop()
    writer = Writer(connection, hooks, hooks.committed)

    async def crowd(first: int, size: int) -> float:
        started = loop.time()
        await asyncio.gather(*(writer.call(insert(number)) for number in range(first, first + size)))
        return loop.time() - started

    assert [await crowd(number, 1) < 0.4 for number in range(5)] == [True] * 5, "one after the other: nobody waits for company"
    assert await crowd(10, 3) < 0.4
    commits = hooks.commits
    assert await crowd(20, 3) < 0.4 and hooks.commits == commits + 1, "as many as last time: no need to wait for more"
    assert await crowd(30, 2) >= 0.5 and hooks.commits == commits + 2, "fewer: a moment is spent on the third"
    assert await crowd(40, 2) < 0.4
    assert await crowd(50, 1) >= 0.5 and await crowd(51, 1) < 0.4
    writer.close()


async def test_a_failing_unit_is_undone_alone(connection: sqlite3.Connection, hooks: Recorder, tmp_path: Path) -> None:
    writer = Writer(connection, hooks, hooks.committed)

    def broken(connection: sqlite3.Connection) -> None:
        insert(50)(connection)
        raise ValueError("mine")

    outcomes = await asyncio.gather(
        writer.call(insert(1)), writer.call(broken), writer.call(insert(1)), writer.call(insert(2)), return_exceptions=True
    )
    assert outcomes[0] == 1 and outcomes[3] == 2
    assert isinstance(outcomes[1], ValueError)
    assert isinstance(outcomes[2], sqlite3.IntegrityError)
    assert rows(tmp_path) == [1, 2]
    writer.close()


async def test_what_goes_wrong_before_the_commit_fails_only_those_who_brought_it(
    connection: sqlite3.Connection, hooks: Recorder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(hooks, "flush", lambda: 1 / connection.execute("SELECT count(*) = 0 FROM t WHERE n = 2").fetchone()[0])
    writer = Writer(connection, hooks, hooks.committed)
    outcomes = await asyncio.gather(*(writer.call(insert(n)) for n in (1, 2, 3)), return_exceptions=True)
    assert (outcomes[0], type(outcomes[1]), outcomes[2]) == (1, ZeroDivisionError, 3)
    assert hooks.resets >= 1
    assert rows(tmp_path) == [1, 3]
    writer.close()


async def test_a_full_disk_fails_only_what_does_not_fit(
    connection: sqlite3.Connection, hooks: Recorder, tmp_path: Path
) -> None:
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    connection.execute(f"PRAGMA max_page_count = {pages + 20}")
    writer = Writer(connection, hooks, hooks.committed)
    outcomes = await asyncio.gather(
        writer.call(insert(1)), writer.call(insert(2, 10_000_000)), writer.call(insert(3)), return_exceptions=True
    )
    assert outcomes[0] == 1 and outcomes[2] == 3
    assert isinstance(outcomes[1], StorageError)
    assert "full" in outcomes[1].message and outcomes[1].hint
    assert hooks.resets >= 1
    assert await writer.call(insert(4)) == 4
    assert rows(tmp_path) == [1, 3, 4]
    writer.close()


async def test_a_cancelled_caller_changes_nothing_for_others(
    connection: sqlite3.Connection, hooks: Recorder, tmp_path: Path
) -> None:
    writer = Writer(connection, hooks, hooks.committed)
    gate = threading.Event()
    first = asyncio.ensure_future(writer.call(lambda _: gate.wait(5)))
    gone = asyncio.ensure_future(writer.call(insert(1)))
    kept = asyncio.ensure_future(writer.call(insert(2)))
    await asyncio.sleep(0.02)
    gone.cancel()
    gate.set()
    assert await kept == 2
    await first
    assert rows(tmp_path) == [1, 2]
    writer.close()


async def test_close_commits_what_waits_and_then_refuses(
    connection: sqlite3.Connection, hooks: Recorder, tmp_path: Path
) -> None:
    writer = Writer(connection, hooks, hooks.committed)
    waiting = [asyncio.ensure_future(writer.call(insert(n))) for n in range(20)]
    await asyncio.sleep(0)
    await asyncio.to_thread(writer.close)
    assert await asyncio.gather(*waiting) == list(range(20))
    assert rows(tmp_path) == list(range(20))
    assert not (tmp_path / "x.db-wal").exists()
    with pytest.raises(Draining):
        await writer.call(insert(99))


def test_durability_sets_what_is_synced(tmp_path: Path) -> None:
    for durability, level in (("process", 1), ("power", 2)):
        opened = connect(tmp_path / f"{durability}.db", durability)  # type: ignore[arg-type]
        assert opened.execute("PRAGMA synchronous").fetchone() == (level,)
        assert opened.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        opened.close()


async def test_subscribers_hear_of_commits_and_cannot_break_them(log: ExperienceLog, make: Make) -> None:
    heard: list[int] = []

    def listener() -> None:
        heard.append(len(log.page("s1")))
        raise RuntimeError("a broken listener")

    stop = log.subscribe(listener)
    await log.append(make())
    await log.append(make())
    for _ in range(100):
        if 2 in heard:
            break
        await asyncio.sleep(0.01)
    # Heard after the commit: the row is visible from inside the listener. The fixture's own commit may be heard as well.
    assert [number for number in heard if number] == [1, 2]
    stop()
    heard.clear()
    await log.append(make())
    await log.write(lambda connection: None)
    assert heard == []


async def test_refused_records_leave_no_trace_in_their_group(log: ExperienceLog, make: Make) -> None:
    good: list[Any] = [make(f"m{n}") for n in range(10)]
    bad = make("x", tags={"a": object()})
    taken = make("other", id=good[0].id)
    outcomes = await asyncio.gather(*(log.append(r) for r in [*good, bad, taken]), return_exceptions=True)
    assert [type(outcome).__name__ for outcome in outcomes[10:]] == ["InvalidRequest", "ContentConflict"]
    assert isinstance(outcomes[10], InvalidRequest)
    assert outcomes[:10] == [None] * 10
    with log.read() as connection:
        assert connection.execute("SELECT count(*) FROM records").fetchone() == (10,)
        assert connection.execute("SELECT count(*) FROM payloads").fetchone() == (10,)
    assert log.counts("s1")["inferences"] == 10


async def test_records_fail_one_by_one_when_the_disk_is_full(log: ExperienceLog, make: Make) -> None:
    def limit(connection: sqlite3.Connection) -> None:
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages + 30}")

    await log.write(limit)
    big = make("y" * 3_000_000)
    small = [make(f"small {n}") for n in range(5)]
    outcomes = await asyncio.gather(*(log.append(r) for r in [*small, big]), return_exceptions=True)
    assert outcomes[:5] == [None] * 5
    assert isinstance(outcomes[5], StorageError)
    assert log.counts("s1")["inferences"] == 5
    assert all(log.get("s1", record.id) == record for record in small)
    await log.write(lambda connection: connection.execute("PRAGMA max_page_count = 1000000").fetchall())
    await log.append(big)
    assert log.get("s1", big.id) == big


async def test_a_record_that_cannot_be_placed_takes_no_other_with_it(path: Path, make: Make) -> None:
    """What its conversation builds on is damaged; that shows when it is placed, which another record of its group asks for."""
    said = [{"role": "system", "content": "You code. " * 300}, {"role": "user", "content": "one"}]
    log = ExperienceLog.open(path)
    await log.scenarios.ensure("s1")
    for number in range(2):
        await log.append(make(said))
        said += [{"role": "assistant", "content": "hi there"}, {"role": "user", "content": f"more {number}"}]
    await log.write(lambda connection: connection.execute("DELETE FROM payloads WHERE base IS NULL"))
    log.close()
    log = ExperienceLog.open(path)
    before, after = make("asked"), make([{"role": "user", "content": "asked"}, *said[2:4]])
    broken, apart = make(said), make("apart")
    outcomes = await asyncio.gather(*(log.append(r) for r in (before, broken, after, apart)), return_exceptions=True)
    assert [outcome is None for outcome in outcomes] == [True, False, True, True]
    assert [log.get("s1", record.id) for record in (before, broken, after, apart)] == [before, None, after, apart]
    assert log.counts("s1")["inferences"] == 5
    log.close()


async def test_a_long_log_is_folded_in_while_the_writer_goes_on(
    connection: sqlite3.Connection, hooks: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reef_cli.experience.writer.FOLD", 1 << 20)
    monkeypatch.setattr("reef_cli.experience.writer.FOLD_NOW", 4 << 20)
    gate, began = threading.Event(), threading.Event()

    def gated(file: str) -> None:
        began.set()
        assert gate.wait(20)
        _fold_beside(file)

    monkeypatch.setattr("reef_cli.experience.writer._fold_beside", gated)
    writer = Writer(connection, hooks, hooks.committed)
    number = 0
    while not began.is_set():
        number = await writer.call(insert(number + 1, 100_000))
    assert 10 <= number < 20
    for _ in range(10):
        number = await writer.call(insert(number + 1, 100_000))
    assert (tmp_path / "x.db").stat().st_size < 1 << 20, "folding has not begun, and nobody waited for it"
    more = [asyncio.ensure_future(writer.call(insert(n, 100_000))) for n in range(number + 1, number + 60)]
    await asyncio.wait(more, timeout=0.3)
    late = asyncio.ensure_future(writer.call(insert(500)))
    await asyncio.wait([late], timeout=0.3)
    assert not late.done(), "the log does not grow without end: now the writer waits"
    gate.set()
    await asyncio.gather(late, *more)
    await writer.call(insert(501))
    assert (tmp_path / "x.db").stat().st_size > 4 << 20
    await asyncio.to_thread(writer.close)
    assert rows(tmp_path) == [*range(1, number + 60), 500, 501]
    assert not (tmp_path / "x.db-wal").exists()


async def test_a_log_that_cannot_be_folded_in_ends_no_writer(
    connection: sqlite3.Connection,
    hooks: Recorder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    writer = Writer(connection, hooks, hooks.committed)

    def failing(_: Writer) -> tuple[int, int]:
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(Writer, "_written", failing)
    for number in range(3):
        assert await asyncio.wait_for(writer.call(insert(number)), 5) == number
    await asyncio.to_thread(writer.close)
    assert rows(tmp_path) == [0, 1, 2]
    assert "the write-ahead log was not folded in: disk I/O error" in caplog.text
