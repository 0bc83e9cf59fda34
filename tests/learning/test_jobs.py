"""The ledger: every job ends once, every sample has one fate, every record trains at most once."""

import sqlite3
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from reef_cli.core.errors import ConflictError, JobNotFound
from reef_cli.core.ids import RecordId, ReleaseId
from reef_cli.core.types import JobState
from reef_cli.experience import jobs_schema
from reef_cli.learning import jobs

BASE, NEXT = ReleaseId("r0-00000000"), ReleaseId("r1-00000001")


def database() -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:")
    jobs_schema.create(connection)
    jobs_schema.add_groups(connection)
    jobs_schema.add_harness(connection)
    return connection


def entry(n: int, *records: str) -> jobs.Entry:
    return jobs.Entry(RecordId(f"report{n}"), n, 0, records=tuple(RecordId(record) for record in records or (f"record{n}",)))


def reserve(connection: sqlite3.Connection, *reports: str) -> jobs.Job:
    return jobs.reserve(
        connection,
        scenario="s",
        recipe="m",
        base=BASE,
        release_id=NEXT,
        samples=[RecordId(report) for report in reports],
        at=1.0,
    )


def states(connection: sqlite3.Connection) -> dict[str, str]:
    return dict(connection.execute("SELECT report_id, state FROM sample_state").fetchall())


def drive(connection: sqlite3.Connection, job: jobs.Job, *path: JobState) -> jobs.Job:
    for state in path:
        job = jobs.advance(connection, job, state, 2.0)
    return job


ROAD = (
    JobState.TRAINING,
    JobState.CANDIDATE,
    JobState.EVALUATING,
    JobState.DECIDED,
    JobState.PUBLISHING,
    JobState.LOADED,
)


def test_the_whole_road_consumes_the_samples() -> None:
    connection = database()
    jobs.enqueue(connection, "s", "m", 0.0, [entry(1), entry(2)])
    job = jobs.settle(connection, drive(connection, reserve(connection, "report1", "report2"), *ROAD), 3.0)
    assert not job.open and states(connection) == {"report1": "consumed", "report2": "consumed"}
    told = [row[0] for row in connection.execute("SELECT state FROM job_events ORDER BY seq")]
    assert told == ["reserved", *ROAD, "settled"]


@pytest.mark.parametrize("wrong", [JobState.CANDIDATE, JobState.PUBLISHING, JobState.SETTLED])
def test_a_job_cannot_skip(wrong: JobState) -> None:
    connection = database()
    with pytest.raises(ConflictError):
        jobs.advance(connection, reserve(connection), wrong, 2.0)


def test_two_hands_on_one_job_exclude_each_other() -> None:
    connection = database()
    job = reserve(connection)
    jobs.advance(connection, job, JobState.TRAINING, 2.0)
    with pytest.raises(ConflictError):
        jobs.advance(connection, job, JobState.TRAINING, 2.0)


def test_a_reserved_sample_cannot_be_reserved_again() -> None:
    connection = database()
    jobs.enqueue(connection, "s", "m", 0.0, [entry(1)])
    reserve(connection, "report1")
    with pytest.raises(ConflictError):
        reserve(connection, "report1")


def test_a_failed_job_gives_its_samples_back_and_blames_them_only_when_told() -> None:
    connection = database()
    jobs.enqueue(connection, "s", "m", 0.0, [entry(1)])
    for _ in range(5):
        jobs.fail(connection, reserve(connection, "report1"), 2.0, "outage", blame_samples=False)
    for _ in range(jobs.MAX_ATTEMPTS):
        assert states(connection) == {"report1": "queued"}
        jobs.fail(connection, reserve(connection, "report1"), 2.0, "broken step", blame_samples=True)
    assert states(connection) == {"report1": "dropped"}
    assert connection.execute("SELECT reason FROM sample_state").fetchone()[0] == "failed_repeatedly"


def test_a_second_report_about_a_record_makes_no_second_sample() -> None:
    connection = database()
    jobs.enqueue(connection, "s", "m", 0.0, [entry(1, "a"), entry(2, "a"), entry(3, "b")])
    assert states(connection) == {"report1": "queued", "report2": "refused", "report3": "queued"}
    jobs.settle(connection, drive(connection, reserve(connection, "report1"), *ROAD), 3.0)
    jobs.enqueue(connection, "s", "m", 0.0, [entry(4, "a")])
    reason = connection.execute("SELECT reason FROM sample_state WHERE report_id = 'report4'").fetchone()[0]
    assert reason == "already_trained"
    assert jobs.taken_by(connection, "m", ["b"]) == "already_sampled"
    assert jobs.taken_by(connection, "m", ["b"], besides="report3") == ""
    assert jobs.taken_by(connection, "other recipe", ["a"]) == ""


def test_a_dropped_sample_frees_its_records() -> None:
    connection = database()
    jobs.enqueue(connection, "s", "m", 0.0, [entry(1, "a")])
    jobs.drop(connection, "m", 1.0, [("report1", "stale")])
    jobs.enqueue(connection, "s", "m", 0.0, [entry(2, "a")])
    assert states(connection) == {"report1": "dropped", "report2": "queued"}


def test_an_unknown_job_is_named() -> None:
    with pytest.raises(JobNotFound, match="nope"):
        jobs.get(database(), "nope")


def test_the_checkpoint_belongs_to_content_and_settled_jobs_only() -> None:
    connection = database()

    def run(content: str, folder: str, *, settle: bool) -> None:
        job = drive(connection, reserve(connection), JobState.TRAINING)
        job = jobs.advance(connection, job, JobState.CANDIDATE, 2.0, detail={"checkpoint": folder}, content_id=content)
        if settle:
            jobs.settle(connection, job, 2.0)
        else:
            jobs.fail(connection, job, 2.0, "x", blame_samples=False)

    run("sha256:a", "/one", settle=True)
    run("sha256:a", "/two", settle=True)
    run("sha256:a", "/three", settle=False)
    assert jobs.checkpoint_for(connection, "s", "sha256:a") == "/two"
    assert jobs.checkpoint_for(connection, "s", "sha256:b") is None


class Ledger(RuleBasedStateMachine):
    """Random reports, reservations, moves, failures and settlements, against what must always hold."""

    @initialize()
    def start(self) -> None:
        self.connection = database()
        self.count = 0
        self.trained: list[str] = []

    @rule(record=st.integers(0, 12))
    def report(self, record: int) -> None:
        self.count += 1
        jobs.enqueue(self.connection, "s", "m", 0.0, [entry(self.count, f"record{record}")])

    def _open(self) -> list[jobs.Job]:
        return jobs.open_jobs(self.connection)

    @precondition(lambda self: not self._open())
    @rule(size=st.integers(1, 4))
    def open(self, size: int) -> None:
        waiting = jobs.queued(self.connection, "s", "m", size)
        reserve(self.connection, *(item.report_id for item in waiting))

    @precondition(lambda self: self._open())
    @rule(data=st.data())
    def move(self, data: Any) -> None:
        job = self._open()[0]
        to = data.draw(st.sampled_from(sorted(jobs.TRANSITIONS[job.state])))
        if to is JobState.SETTLED:
            held = jobs.reserved_reports(self.connection, job.id)
            marks = ",".join("?" * len(held))
            rows = self.connection.execute(f"SELECT record_id FROM sample_records WHERE report_id IN ({marks})", held)
            self.trained += [row[0] for row in rows]
            jobs.settle(self.connection, job, 1.0)
        elif to is JobState.FAILED:
            jobs.fail(self.connection, job, 1.0, "x", blame_samples=data.draw(st.booleans()))
        else:
            jobs.advance(self.connection, job, to, 1.0)

    @rule(limit=st.integers(1, 3))
    def drop_some(self, limit: int) -> None:
        waiting = jobs.queued(self.connection, "s", "m", limit)
        jobs.drop(self.connection, "m", 1.0, [(item.report_id, "stale") for item in waiting])

    @invariant()
    def no_record_trains_twice(self) -> None:
        assert len(self.trained) == len(set(self.trained))

    @invariant()
    def every_report_has_one_fate(self) -> None:
        assert len(states(self.connection)) == self.count
        reserved = self.connection.execute("SELECT job_id FROM sample_state WHERE state = 'reserved'").fetchall()
        assert {row[0] for row in reserved} <= {job.id for job in self._open()}


Ledger.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestLedger = Ledger.TestCase
