"""Feedback: validation, references, idempotency for ever, atomic import."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reef_cli.core.errors import ContentConflict, InvalidReference, InvalidRequest, ScenarioNotFound
from reef_cli.core.types import Inference, Report
from reef_cli.experience.codec import from_document, to_document
from reef_cli.experience.log import ExperienceLog
from reef_cli.experience.model import Instruction

Make = Callable[..., Inference]
MakeReport = Callable[..., Report]


async def stored(log: ExperienceLog, make: Make, count: int = 1, **fields: Any) -> list[Inference]:
    records = [make(f"m{n}", **fields) for n in range(count)]
    for record in records:
        await log.append(record)
    return records


async def test_a_report_is_stored_once_whatever_its_time(log: ExperienceLog, make: Make, report: MakeReport) -> None:
    (record,) = await stored(log, make)
    first = report(record, id="g:1", score=0.5, feedback={"why": "x"}, metadata={"a": [1, 2.5, None]})
    assert await log.report(first) is True
    assert await log.report(replace(first, created_at=first.created_at + 2)) is False
    assert log.get("s1", "g:1") == first
    assert log.counts("s1")["reports"] == 1


async def test_key_order_is_no_other_content(log: ExperienceLog, make: Make, report: MakeReport) -> None:
    (record,) = await stored(log, make)
    assert await log.report(report(record, id="g:1", score=1, metadata={"a": 1, "b": 2}))
    assert not await log.report(report(record, id="g:1", score=1.0, metadata={"b": 2, "a": 1}))


@pytest.mark.parametrize(
    "change", [{"score": 0.6}, {"score": None}, {"feedback": "other"}, {"metadata": {"eligible": False}}, {"references": ()}]
)
async def test_other_content_under_the_same_id_is_a_conflict(
    log: ExperienceLog, make: Make, report: MakeReport, change: dict[str, Any]
) -> None:
    (record,) = await stored(log, make)
    first = report(record, id="g:1", score=0.5, feedback="fine")
    await log.report(first)
    with pytest.raises(ContentConflict):
        await log.report(replace(first, **change))
    assert log.get("s1", "g:1") == first


async def test_conflicts_are_recognised_after_eviction_and_restart(
    path: Path, log: ExperienceLog, make: Make, report: MakeReport, settle: Callable[..., Any]
) -> None:
    (record,) = await stored(log, make)
    first = report(record, id="x", score=0.5)
    await log.report(first)
    await settle(first, "consumed")
    dropped = await log.retain(keep_bytes=0)
    assert (dropped.records, dropped.reports) == (1, 1)
    assert log.get("s1", "x") is None
    log.close()
    again = ExperienceLog.open(path)
    assert await again.report(replace(first, created_at=5.0)) is False
    with pytest.raises(ContentConflict):
        await again.report(replace(first, score=0.4))
    assert again.counts("s1")["reports"] == 1
    again.close()


async def test_unknown_foreign_wrong_and_double_references_are_named(
    log: ExperienceLog, make: Make, report: MakeReport
) -> None:
    await log.scenarios.ensure("s2")
    mine, other = await stored(log, make, 2)
    feedback = report(mine)
    await log.report(feedback)
    note = await log.instruct("s1", "be kind")
    foreign = make("theirs", scenario="s2")
    await log.append(foreign)
    before = (log.counts("s1"), log.counts("s2"))
    for bad in ("0" * 32, foreign.id, feedback.id, note, mine.id):
        with pytest.raises(InvalidReference) as caught:
            await log.report(replace(report(mine), references=(mine.id, bad, other.id)))
        assert caught.value.details["reference"] == bad
        assert bad in caught.value.message
    assert (log.counts("s1"), log.counts("s2")) == before


async def test_evicted_references_are_refused_by_name(
    log: ExperienceLog, make: Make, report: MakeReport, settle: Callable[..., Any]
) -> None:
    (record,) = await stored(log, make)
    first = report(record)
    await log.report(first)
    await settle(first, "consumed")
    await log.retain(keep_bytes=0)
    with pytest.raises(InvalidReference, match="evicted"):
        await log.report(report(record))


@pytest.mark.parametrize(
    "fields",
    [
        *({"score": value} for value in (float("nan"), float("inf"), float("-inf"), True, "1.0")),
        *({"feedback": value} for value in (["a"], 5)),
        {"score": None},
        {"metadata": {"x": {"y": [float("nan")]}}},
        {"feedback": {"x": float("inf")}},
        {"id": ""},
        {"id": "x" * 201},
        {"id": "a\nb"},
        {"metadata": {"x": object()}},
        {"feedback": "\ud800"},
    ],
)
async def test_malformed_reports_change_nothing(
    log: ExperienceLog, make: Make, report: MakeReport, fields: dict[str, Any]
) -> None:
    (record,) = await stored(log, make)
    with pytest.raises(InvalidRequest):
        await log.report(report(record, **fields))
    assert log.counts("s1")["records"] == 1


async def test_several_references_keep_their_order(log: ExperienceLog, make: Make, report: MakeReport) -> None:
    a, b, c = await stored(log, make, 3)
    first = report(c, a, b)
    await log.report(first)
    ((sequence, read),) = log.reports_after("s1", 0)
    assert read.references == (c.id, a.id, b.id)
    assert log.references(read.references) == [c, a, b]
    assert log.reports_after("s1", sequence) == []


async def test_reports_come_in_order_and_in_pages(log: ExperienceLog, make: Make, report: MakeReport) -> None:
    records = await stored(log, make, 7)
    reports = [report(record, score=n / 10) for n, record in enumerate(records)]
    for feedback in reports:
        await log.report(feedback)
    seen: list[Report] = []
    after = 0
    while page := log.reports_after("s1", after, 3):
        seen += [feedback for _, feedback in page]
        after = page[-1][0]
    assert seen == reports


async def test_the_same_report_from_many_senders_is_stored_once(log: ExperienceLog, make: Make, report: MakeReport) -> None:
    (record,) = await stored(log, make)
    feedback = report(record, id="g:1")
    outcomes = await asyncio.gather(*(log.report(replace(feedback, created_at=float(n))) for n in range(30)))
    assert sorted(outcomes) == [False] * 29 + [True]


async def test_a_report_may_follow_its_record_in_one_group(log: ExperienceLog, make: Make, report: MakeReport) -> None:
    record = make("a")
    outcomes = await asyncio.gather(log.append(record), log.report(report(record)))
    assert outcomes == [None, True]


async def test_batches_are_all_or_nothing_and_idempotent(log: ExperienceLog, make: Make, report: MakeReport) -> None:
    first, second = make("a"), make("b")
    good = report(first)
    bad = replace(report(second), references=("0" * 32,))
    with pytest.raises(InvalidReference):
        await log.import_batch([first, good, second, bad])
    assert log.counts("s1")["records"] == 0
    assert log.counts("s1")["stored_bytes"] == 0
    batch = [first, good, second, report(second)]
    assert await log.import_batch(batch) == [True] * 4
    assert await log.import_batch(batch) == [False] * 4
    assert log.counts("s1")["records"] == 4
    assert log.get("s1", first.id) == first


async def test_a_refused_batch_does_not_hurt_what_comes_after(log: ExperienceLog, make: Make, converse: Any) -> None:
    talk = converse()
    await talk.say("one")
    history = list(talk.messages)
    next_turn = make([*history, {"role": "user", "content": "two"}])
    with pytest.raises(ScenarioNotFound):
        await log.import_batch([next_turn, make("x", scenario="nowhere")])
    turn = await talk.say("two")
    again = await talk.say("three")
    assert log.get("s1", turn.id) == turn
    assert log.get("s1", again.id) == again
    assert log.counts("s1")["inferences"] == 3


async def test_batches_have_a_size_and_reports_follow_what_they_cite(
    log: ExperienceLog, make: Make, report: MakeReport
) -> None:
    record = make("a")
    with pytest.raises(InvalidRequest):
        await log.import_batch([])
    with pytest.raises(InvalidRequest):
        await log.import_batch([record] * 1001)
    with pytest.raises(InvalidReference):
        await log.import_batch([report(record), record])
    note = Instruction("n1", "s1", 1.0, "shorter")  # type: ignore[arg-type]
    assert await log.import_batch([record, report(record), note]) == [True] * 3


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"kind": "letter"}, "kind"),
        ({"id": 5}, "id"),
        ({"created_at": "now"}, "created_at"),
        ({"dialect": "morse"}, "dialect"),
        ({"request": 5}, "request"),
        ({"request": {"base64": "!!"}}, "base64"),
        ({"messages": "hi"}, "messages"),
        ({"tags": []}, "tags"),
        ({"complete": "yes"}, "complete"),
        ({"tokens": {"prompt_ids": 3}}, "token"),
        ({"surprise": 1}, "surprise"),
        ({"model": ""}, "model"),
    ],
)
def test_documents_name_what_is_wrong_with_them(make: Make, change: dict[str, Any], names: str) -> None:
    with pytest.raises(InvalidRequest, match=names):
        from_document({**to_document(make("a")), **change})


def test_documents_may_leave_out_what_follows_from_the_body() -> None:
    record = from_document(
        {
            "id": "a",
            "created_at": 1,
            "dialect": "chat",
            "model": "m",
            "request": {"messages": [{"role": "user", "content": "x"}]},
        },
        "s9",
    )
    assert isinstance(record, Inference)
    assert record.scenario == "s9"
    assert record.messages == [{"role": "user", "content": "x"}]
