"""Retention: only what is settled goes, oldest first; the rest stays readable; what went is counted and listed."""

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reef_cli.core.types import Inference, Report
from reef_cli.experience.log import ExperienceLog

Make = Callable[..., Inference]
MakeReport = Callable[..., Report]
DAY = 86400.0


async def reported(
    log: ExperienceLog, make: Make, report: MakeReport, settle: Callable[..., Any], states: list[str | None], **fields: Any
) -> list[Inference]:
    """One exchange per state, each with a report in that state of the ledger; None is an exchange nobody reported on."""
    records = []
    for number, state in enumerate(states):
        record = make(f"text {number} " * 200, **fields)
        await log.append(record)
        records.append(record)
        if state is not None:
            feedback = report(record)
            await log.report(feedback)
            if state:
                await settle(feedback, state)
    return records


async def test_only_settled_records_go(log: ExperienceLog, make: Make, report: MakeReport, settle: Callable[..., Any]) -> None:
    states = ["consumed", "queued", "dropped", "", "refused", "reserved", None]
    records = await reported(log, make, report, settle, states)
    cut = make("cut", None, complete=False)
    await log.append(cut)
    dropped = await log.retain(keep_bytes=0)
    gone = {records[0].id, records[2].id, records[4].id, cut.id}
    assert (dropped.records, dropped.reports) == (4, 3)
    for record in [*records, cut]:
        assert log.get("s1", record.id) == (None if record.id in gone else record)
    listed = log.evicted("s1")
    assert {row.id for row in listed if row.kind == "inference"} == gone
    assert {row.why for row in listed} == {"bytes", "age"}
    assert log.counts("s1")["evicted"] == 7
    assert log.counts("s1")["inferences"] == 8
    assert [row.evicted_at is not None for row in log.page("s1", kind="inference")] == [
        *(True, False, True, False, True, False, False, True)
    ]


async def test_being_told_drops_the_rest_but_never_reserved_ones(
    log: ExperienceLog, make: Make, report: MakeReport, settle: Callable[..., Any]
) -> None:
    records = await reported(log, make, report, settle, ["queued", "reserved", None])
    assert (await log.retain(keep_bytes=0)).records == 0
    assert (await log.retain(keep_bytes=0, unconsumed=True)).records == 2
    assert log.references([record.id for record in records]) == [records[1]]


async def test_bytes_are_freed_oldest_first_and_no_more_than_needed(
    log: ExperienceLog, make: Make, report: MakeReport, settle: Callable[..., Any]
) -> None:
    records = await reported(log, make, report, settle, ["consumed"] * 10, body=b"")
    before = log.counts("s1")["stored_bytes"]
    dropped = await log.retain(keep_bytes=before // 2)
    kept = log.references([record.id for record in records])
    assert kept == records[dropped.records :]
    assert 0 < dropped.records < 10
    assert before // 3 < log.counts("s1")["stored_bytes"] <= before // 2
    assert (await log.retain(keep_bytes=before // 2)).records == 0
    assert (await log.retain()).records == 0


async def test_age_counts_from_the_record(
    log: ExperienceLog, clock: Any, make: Make, report: MakeReport, settle: Callable[..., Any]
) -> None:
    old = await reported(log, make, report, settle, ["consumed"] * 3, at=clock.now())
    clock.time += 10 * DAY
    new = await reported(log, make, report, settle, ["consumed"] * 3, at=clock.now())
    assert (await log.retain(keep_days=5)).records == 3
    assert log.references([record.id for record in old + new]) == new
    assert {row.why for row in log.evicted("s1")} == {"age"}


async def test_what_others_are_built_on_stays_readable(
    log: ExperienceLog, converse: Callable[..., Any], report: MakeReport, settle: Any
) -> None:
    talk = converse("You code. " * 500)
    turns = [await talk.say(f"q{number} " * 50) for number in range(12)]
    for turn in turns[:6]:
        feedback = report(turn)
        await log.report(feedback)
        await settle(feedback, "consumed")
    await log.retain(keep_bytes=0)
    assert log.references([turn.id for turn in turns]) == turns[6:]
    # The session goes on, on bases that are all there.
    later = await talk.say("later")
    assert log.get("s1", later.id) == later
    for turn in [*turns[6:], later]:
        feedback = report(turn)
        await log.report(feedback)
        await settle(feedback, "consumed")
    await log.retain(keep_bytes=0)
    assert log.counts("s1")["stored_bytes"] == 0
    with log.read() as connection:
        assert connection.execute("SELECT count(*) FROM payloads").fetchone() == (0,)
    fresh = await talk.say("after everything")
    assert log.get("s1", fresh.id) == fresh


async def test_archived_scenarios_are_done_with(log: ExperienceLog, make: Make) -> None:
    await log.append(make("a"))
    label = (await log.scenarios.archive("s1")).name
    assert (await log.retain(keep_bytes=0)).records == 1
    assert len(log.evicted(label)) == 1


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=12, unique=True))
async def test_any_order_of_eviction_keeps_the_rest_exact(
    tmp_path_factory: Any, make: Make, report: MakeReport, chosen: list[int]
) -> None:
    log = ExperienceLog.open(tmp_path_factory.mktemp("r") / "x.db")
    await log.scenarios.ensure("s1")
    said: list[dict[str, str]] = []
    records = []
    for number in range(10):
        said = [
            *said[: number // 2 * 2],
            {"role": "user", "content": f"{number} " * 300},
            {"role": "assistant", "content": "hi there"},
        ]
        records.append(make(said[:-1]))
        await log.append(records[-1])
    for index in chosen:
        feedback = report(records[index])
        await log.report(feedback)

        def consume(connection: Any, item: Report = feedback) -> None:
            connection.execute(
                "INSERT INTO sample_state (recipe, report_id, scenario, sequence, state, at)"
                " VALUES ('r', ?, 's1', 1, 'consumed', 0)",
                (item.id,),
            )

        await log.write(consume)
        await log.retain(keep_bytes=0)
    kept = [record for number, record in enumerate(records) if number not in chosen]
    assert log.references([record.id for record in records]) == kept
    assert log.counts("s1")["evicted"] == 2 * len(chosen)
    log.close()


async def test_it_says_whether_something_had_to_stay(
    log: ExperienceLog, clock: Any, make: Make, report: MakeReport, settle: Callable[..., Any]
) -> None:
    await reported(log, make, report, settle, ["consumed", "queued"], at=clock.now())
    clock.time += 10 * DAY
    assert not (await log.retain()).held and not (await log.retain(keep_days=20)).held
    assert (await log.retain(keep_days=5)).held and (await log.retain(keep_bytes=0)).held
    assert not (await log.retain(keep_days=5, unconsumed=True)).held
    assert not (await log.retain(keep_bytes=0, unconsumed=True)).held
