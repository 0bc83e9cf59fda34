"""The log's door: append, read back, page, count."""

import asyncio
import json
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reef_cli.core.errors import ContentConflict, Draining, InvalidRequest, ScenarioNotFound, StorageError
from reef_cli.core.types import Inference, Report
from reef_cli.experience.codec import from_document
from reef_cli.experience.log import ExperienceLog
from reef_cli.experience.model import Instruction

Make = Callable[..., Inference]
MakeReport = Callable[..., Report]


async def test_a_record_is_readable_when_append_returns(log: ExperienceLog, make: Make) -> None:
    record = make("hello", body={"logit_bias": {"5": -1}, "top_k": 3}, tags={"client": "c"}, raw_text="hi there<|end|>")
    await log.append(record)
    assert log.get("s1", record.id) == record
    assert log.get("s2", record.id) is None
    assert log.get("s1", "nothing") is None
    assert log.scenario_of(record.id) == "s1"


async def test_a_reopened_log_has_everything(path: Path, make: Make) -> None:
    log = ExperienceLog.open(path)
    await log.scenarios.ensure("s1", "r", mode="hybrid")
    records = [make([{"role": "user", "content": f"m{n}" * 400}]) for n in range(20)]
    for record in records:
        await log.append(record)
    log.close()
    log.close()
    again = ExperienceLog.open(path)
    assert [again.get("s1", record.id) for record in records] == records
    more = make("more")
    await again.append(more)
    assert again.page("s1", newest=True, limit=1)[0].sequence == 21
    assert again.scenarios.get("s1").training_mode == "hybrid"
    again.close()
    assert path.stat().st_mode & 0o077 == 0


async def test_appending_again_is_recognised_and_other_content_refused(log: ExperienceLog, make: Make) -> None:
    record = make("a")
    await log.append(record)
    await log.append(record)
    assert log.counts("s1")["inferences"] == 1
    await log.scenarios.ensure("s2")
    with pytest.raises(ContentConflict):
        await log.append(make("b", id=record.id))
    with pytest.raises(ContentConflict, match="another scenario"):
        await log.append(make("a", id=record.id, scenario="s2"))


async def test_unknown_scenarios_are_refused(log: ExperienceLog, make: Make, report: MakeReport) -> None:
    with pytest.raises(ScenarioNotFound):
        await log.append(make("a", scenario="nowhere"))
    with pytest.raises(ScenarioNotFound):
        await log.report(report(scenario="nowhere"))
    with pytest.raises(ScenarioNotFound):
        await log.instruct("nowhere", "do better")
    with pytest.raises(ScenarioNotFound):
        log.page("nowhere")
    assert [scenario.name for scenario in log.scenarios.list()] == ["s1"]


async def test_pages_run_forward_and_backward_and_by_kind(log: ExperienceLog, make: Make, report: MakeReport) -> None:
    await log.scenarios.ensure("s2")
    records = []
    for number in range(6):
        records.append(make(f"q{number}", complete=number != 3, error="gone" if number == 3 else None))
        await log.append(records[-1])
        await log.append(make("noise", scenario="s2"))
    await log.report(report(records[0], score=0.25, feedback="so \x1b[31mgood\x07\nindeed"))
    await log.instruct("s1", "be brief", record_id="i1")
    first = log.page("s1", limit=4)
    assert [row.id for row in first] == [record.id for record in records[:4]]
    assert (first[3].complete, first[3].error) == (False, "gone")
    rest = log.page("s1", after_sequence=first[-1].sequence)
    assert [row.kind for row in rest] == ["inference", "inference", "report", "train"]
    assert [row.id for row in log.page("s1", newest=True, limit=2)] == ["i1", rest[2].id]
    only = log.page("s1", kind="report")
    assert (only[0].score, only[0].summary) == (0.25, "so [31mgood indeed")
    assert [row.summary for row in log.page("s1", kind="train")] == ["be brief"]
    for bad in (0, 1001, -1):
        with pytest.raises(InvalidRequest):
            log.page("s1", limit=bad)


async def test_references_come_in_the_given_order_without_what_is_gone(log: ExperienceLog, make: Make) -> None:
    records = [make(f"m{n}") for n in range(4)]
    for record in records:
        await log.append(record)
    order = [records[2].id, "unknown", records[0].id]
    assert log.references(order) == [records[2], records[0]]


async def test_instructions_are_kept_and_recognised(log: ExperienceLog) -> None:
    first = await log.instruct("s1", "use fewer words", session="a", metadata={"requires": ["x"]}, record_id="t1")
    assert first == "t1"
    assert await log.instruct("s1", "use fewer words", session="a", metadata={"requires": ["x"]}, record_id="t1") == "t1"
    stored = log.get("s1", "t1")
    assert isinstance(stored, Instruction)
    assert (stored.text, stored.session, stored.metadata) == ("use fewer words", "a", {"requires": ["x"]})
    with pytest.raises(ContentConflict):
        await log.instruct("s1", "use more words", record_id="t1")
    assert log.counts("s1")["instructions"] == 1


async def test_counts_follow_records_and_the_ledger(
    log: ExperienceLog, make: Make, report: MakeReport, settle: Callable[..., Any]
) -> None:
    records = [make(f"m{n}", complete=n != 0) for n in range(5)]
    reports = [report(record) for record in records]
    for record, feedback in zip(records, reports, strict=True):
        await log.append(record)
        await log.report(feedback)
    for feedback, state, why in zip(
        reports, ("queued", "consumed", "dropped", "dropped", "refused"), ("", "", "stale", "stale", "incomplete"), strict=True
    ):
        await settle(feedback, state, why)
    counts = log.counts("s1")
    assert (counts["records"], counts["inferences"], counts["reports"], counts["incomplete"]) == (10, 5, 5, 1)
    assert (counts["queued"], counts["reserved"], counts["consumed"]) == (1, 0, 1)
    assert (counts["dropped"], counts["dropped:stale"], counts["refused:incomplete"]) == (2, 2, 1)
    with log.read() as connection:
        stored = connection.execute("SELECT sum(stored_bytes) FROM records").fetchone()[0]
    assert counts["stored_bytes"] == stored


async def test_eligibility_gives_stable_reasons(
    log: ExperienceLog, make: Make, report: MakeReport, settle: Callable[..., Any]
) -> None:
    good, sampled, trained = make("a"), make("b"), make("c")
    assert good.tokens is not None
    cut = make("d", complete=False)
    plain = make("e", tokens=None)
    aborted = make("f", tokens=replace(good.tokens, finish="abort"))
    gap = make("g", tokens=replace(good.tokens, spans=()))
    masked = make("h", tokens=replace(good.tokens, loss_mask=(0, 0, 0)))
    everything = [good, sampled, trained, cut, plain, aborted, gap, masked]
    for record in everything:
        await log.append(record)
    for record, state in ((sampled, "reserved"), (trained, "consumed")):
        feedback = report(record)
        await log.report(feedback)
        await settle(feedback, state)
    found = log.eligibility("s1", [record.id for record in everything] + ["nothing"])
    assert [item.reason for item in found] == [
        *("eligible", "already_sampled", "already_trained", "incomplete", "no_tokens", "aborted", "span_gap", "not_sampled"),
        "unknown",
    ]
    assert [item.eligible for item in found] == [True] + [False] * 8
    assert log.eligibility("s1", [plain.id], needs_tokens=False)[0].eligible
    assert log.eligibility("s1", [trained.id], recipe="another")[0].eligible


async def test_readers_see_one_moment_and_cannot_write(log: ExperienceLog, make: Make) -> None:
    await log.append(make("a"))
    with log.read() as connection:
        before = connection.execute("SELECT count(*) FROM records").fetchone()
        await log.append(make("b"))
        assert connection.execute("SELECT count(*) FROM records").fetchone() == before
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            connection.execute("DELETE FROM records")
    assert len(log.page("s1")) == 2


async def test_many_threads_read_while_the_writer_works(log: ExperienceLog, make: Make) -> None:
    records = [make(f"m{n}") for n in range(60)]

    def look() -> int:
        return sum(1 for row in log.page("s1") if log.get("s1", row.id) is not None)

    async def write() -> None:
        for record in records:
            await log.append(record)

    _, *seen = await asyncio.gather(write(), *(asyncio.to_thread(look) for _ in range(12)))
    assert all(0 <= number <= 60 for number in seen)
    assert look() == 60


async def test_a_closed_log_says_so(path: Path, make: Make) -> None:
    log = ExperienceLog.open(path)
    await log.scenarios.ensure("s1")
    log.close()
    with pytest.raises(Draining):
        await log.append(make())
    with pytest.raises(Draining):
        log.page("s1")


def test_unusable_files_are_storage_errors(tmp_path: Path) -> None:
    broken = tmp_path / "broken.db"
    broken.write_bytes(b"this is no database at all, whatever its name says" * 100)
    with pytest.raises(StorageError):
        ExperienceLog.open(broken)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        ExperienceLog.open(tmp_path / "file" / "x.db")


async def test_spaced_and_escaped_bodies_come_back_byte_for_byte(log: ExperienceLog, make: Make) -> None:
    said = [{"role": "user", "content": 'päivää \u2028 "quoted" \\ 😀'}]
    for body in (json.dumps({"messages": said}, indent=3).encode(), b'{"a":1e5,"a":2, "messages" :[]}  ', b"\xff\xfe no json"):
        record = make(said, body=body)
        await log.append(record)
        assert log.get("s1", record.id) == record


@pytest.mark.parametrize("name", ["tags", "usage", "timings"])
def test_a_null_object_in_an_imported_record_is_as_good_as_none(name: str) -> None:
    document = {"id": "i:1", "dialect": "chat", "model": "m", "request": {"messages": []}, "created_at": 1.0, name: None}
    record = from_document(document, scenario="s")
    assert getattr(record, name) == {}


def test_tags_of_an_imported_record_are_strings() -> None:
    document = {"id": "i:1", "dialect": "chat", "model": "m", "request": {"messages": []}, "created_at": 1.0, "tags": {"a": 1}}
    with pytest.raises(InvalidRequest, match="tags"):
        from_document(document, scenario="s")
