"""Session trees: by name, by shared prefix, forks, side traffic, retries; the cost of long sessions."""

import asyncio
import sqlite3
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from reef_cli.core.errors import RecordNotFound
from reef_cli.core.types import Inference, Report
from reef_cli.experience.log import ExperienceLog
from reef_cli.experience.model import SessionTree
from reef_cli.experience.placing import _FIND, _seen
from reef_cli.experience.schema import migrate

Make = Callable[..., Inference]
Converse = Callable[..., Any]
TOOLS = {"tools": [{"type": "function", "function": {"name": "bash", "description": "run " * 200}}]}


def shape(tree: SessionTree) -> list[tuple[str, int | None, list[str]]]:
    return [(branch.kind, branch.parent, [turn.row.summary for turn in branch.turns]) for branch in tree.branches]


async def test_an_untagged_conversation_is_one_session(log: ExperienceLog, converse: Converse) -> None:
    talk = converse()
    turns = [await talk.say(text) for text in ("one", "two", "three")]
    (row,) = log.sessions("s1")
    assert (row.session, row.source, row.records, row.turns) == (turns[0].id, "prefix", 3, 3)
    tree = log.session_tree("s1", turns[0].id)
    assert shape(tree) == [("main", None, ["one", "two", "three"])]
    assert tree.trainable_tokens == row.trainable_tokens == 9


async def test_equal_openings_of_different_users_stay_apart(log: ExperienceLog, converse: Converse) -> None:
    first, second, third = converse(), converse(), converse()
    await first.say("hi", "hello A")
    await second.say("hi", "hello B")
    await third.say("hi", "hello A")
    await second.say("more b")
    await first.say("more a")
    trees = {row.session: shape(log.session_tree("s1", row.session)) for row in log.sessions("s1")}
    # The answer tells whose conversation goes on; of two with the same answer, the later one is as good as the other.
    assert sorted(trees.values()) == [
        [("main", None, ["hi"])],
        [("main", None, ["hi", "more a"])],
        [("main", None, ["hi", "more b"])],
    ]


async def test_named_sessions_hold_what_is_sent_under_their_name(log: ExperienceLog, converse: Converse) -> None:
    main = converse(session="run-1")
    helper = converse("You search.", tags={"session": "run-1"})
    await main.say("plan")
    await helper.say("find it")
    await main.say("go on")
    await helper.say("and more")
    (row,) = log.sessions("s1")
    assert (row.session, row.source, row.records) == ("run-1", "tag", 4)
    assert shape(log.session_tree("s1", "run-1")) == [
        ("main", None, ["plan", "go on"]),
        ("root", None, ["find it", "and more"]),
    ]


async def test_forks_become_branches_and_tokens_count_once(log: ExperienceLog, converse: Converse, make: Make) -> None:
    talk = converse()
    start = await talk.say("one")
    fork_point = list(talk.messages)
    await talk.say("two")
    await talk.say("three")
    other = converse()
    other.messages = fork_point
    forked = await other.say("another two")
    await other.say("another three")
    tree = log.session_tree("s1", start.id)
    assert shape(tree) == [
        ("main", None, ["one", "two", "three"]),
        ("fork", 0, ["another two", "another three"]),
    ]
    assert tree.branches[1].forked_from == start.id
    assert tree.trainable_tokens == 15
    assert forked.id == tree.branches[1].turns[0].row.id


async def test_an_edited_answer_and_a_cut_off_one_still_continue(log: ExperienceLog, converse: Converse, make: Make) -> None:
    talk = converse()
    first = await talk.say("one")
    talk.messages[-1] = {"role": "assistant", "content": "a person rewrote this"}
    await talk.say("two")
    await log.append(make([*talk.messages, {"role": "user", "content": "cut"}], None, complete=False, error="client left"))
    talk.messages.append({"role": "user", "content": "cut"})
    await talk.say("again")
    assert shape(log.session_tree("s1", first.id)) == [("main", None, ["one", "two", "cut", "again"])]


async def test_tool_calls_are_recognised_however_the_client_spells_them(log: ExperienceLog, make: Make) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "bash", "arguments": '{"command":"ls", "x": 1}'}}
    asked = {"role": "user", "content": [{"type": "text", "text": "list"}]}
    first = make([asked], response={"role": "assistant", "content": None, "tool_calls": [call]}, body=TOOLS)
    await log.append(first)
    replayed = {**call, "id": "call_other", "function": {"name": "bash", "arguments": '{"x":1,"command":"ls"}'}}
    second = make(
        [
            {"role": "user", "content": "list"},
            {"role": "assistant", "content": "", "tool_calls": [replayed], "cache_control": {"type": "ephemeral"}},
            {"role": "tool", "tool_call_id": "call_other", "content": "a b"},
        ],
        body=TOOLS,
    )
    await log.append(second)
    assert len(log.session_tree("s1", first.id).branches[0].turns) == 2


async def test_volatile_system_text_does_not_break_a_session(log: ExperienceLog, make: Make) -> None:
    def system(call: str, day: str) -> dict[str, str]:
        text = f"x-anthropic-billing-header: cc_version={call}\nYou code. cwd: /home/u{call}/p. Today is {day}."
        return {"role": "system", "content": text}

    asked = {"role": "user", "content": "<system-reminder>date</system-reminder>fix it"}
    first = make([system("1", "2026-06-01"), asked], "done")
    await log.append(first)
    later = [system("2", "2026-06-02"), {"role": "user", "content": "fix it"}, {"role": "assistant", "content": "done"}]
    await log.append(make([*later, {"role": "user", "content": "thanks"}]))
    assert [row.records for row in log.sessions("s1")] == [2]


async def test_retries_are_marked_and_kept_apart(log: ExperienceLog, make: Make) -> None:
    ask = make("one", None, session="a", complete=False, error="client left", at=100.0)
    again = make("one", session="a", at=103.0, body=ask.request)
    later = make("one", session="a", at=200.0, body=ask.request)
    for record in (ask, again, later):
        await log.append(record)
    rows = log.page("s1")
    assert [row.retry_of for row in rows] == [None, rows[0].sequence, None]
    assert [row.role for row in rows] == ["turn", "retry", "turn"]
    tree = log.session_tree("s1", "a")
    assert [turn.row.id for turn in tree.retries] == [again.id]


async def test_a_retried_turn_that_goes_on_is_on_the_branch(log: ExperienceLog, converse: Converse, make: Make) -> None:
    talk = converse(session="a")
    first = await talk.say("one")
    failed = make([*talk.messages, {"role": "user", "content": "two"}], None, session="a", complete=False, error="cut")
    await log.append(failed)
    retried = await talk.say("two")
    await talk.say("three")
    tree = log.session_tree("s1", "a")
    main = [turn.row.id for turn in tree.branches[0].turns]
    assert main[:2] == [first.id, retried.id]
    assert {turn.row.id for branch in tree.branches[1:] for turn in branch.turns} == {failed.id}


async def test_equal_untagged_requests_are_samples_not_retries(log: ExperienceLog, make: Make) -> None:
    for number in range(4):
        await log.append(make("roll", f"answer {number}"))
    rows = log.page("s1")
    assert {row.role for row in rows} == {"turn"}
    assert len(log.sessions("s1")) == 4


async def test_side_traffic_is_labelled_and_not_counted_as_turns(log: ExperienceLog, make: Make) -> None:
    ask = {"role": "user", "content": "please summarize the conversation in file x"}
    sent = {
        "turn": make([{"role": "system", "content": "You code."}, ask], body=TOOLS, session="a"),
        "title": make([{"role": "system", "content": "You are a title generator."}, ask], session="a"),
        "compaction": make([{"role": "system", "content": "You are a context summarization assistant."}, ask], session="a"),
        "side": make("is this a question?", session="a"),
        "count_tokens": make("x", session="a", tags={"role": "count_tokens"}),
    }
    for record in sent.values():
        await log.append(record)
    assert [row.role for row in log.page("s1")] == list(sent)
    (row,) = log.sessions("s1")
    assert (row.records, row.turns) == (5, 1)
    kinds = [branch.kind for branch in log.session_tree("s1", "a").branches]
    assert kinds == ["main", "side", "side", "side", "side"]


async def test_reports_show_in_the_tree(log: ExperienceLog, converse: Converse, report: Callable[..., Report]) -> None:
    talk = converse()
    first, second = await talk.say("one"), await talk.say("two")
    await log.report(report(first, second, score=0.5))
    await log.report(report(second, score=None, feedback="words"))
    (branch,) = log.session_tree("s1", first.id).branches
    assert [(turn.reports, turn.score) for turn in branch.turns] == [(1, 0.5), (2, 0.5)]


async def test_sessions_list_in_pages_and_unknown_ones_are_named(log: ExperienceLog, make: Make) -> None:
    for number in range(5):
        await log.append(make(f"m{number}", session=f"run-{number}"))
    first = log.sessions("s1", limit=2)
    assert [row.session for row in first] == ["run-4", "run-3"]
    assert [row.session for row in log.sessions("s1", before="run-3")] == ["run-2", "run-1", "run-0"]
    with pytest.raises(RecordNotFound):
        log.session_tree("s1", "nothing")


async def test_sessions_go_on_after_a_restart(path: Path, make: Make) -> None:
    log = ExperienceLog.open(path)
    await log.scenarios.ensure("s1")
    first = make([{"role": "system", "content": "x" * 3000}, {"role": "user", "content": "one"}], body=TOOLS)
    await log.append(first)
    log.close()
    log = ExperienceLog.open(path)
    history = [*first.messages, {"role": "assistant", "content": "hi there"}, {"role": "user", "content": "two"}]
    second = make(history, body=TOOLS)
    await log.append(second)
    assert len(log.session_tree("s1", first.id).branches[0].turns) == 2
    assert log.get("s1", second.id) == second
    with log.read() as connection:
        assert connection.execute("SELECT stored_bytes FROM records WHERE id = ?", (second.id,)).fetchone()[0] < 1500
    log.close()


async def grow(converse: Converse, turns: int, **fields: Any) -> tuple[list[Inference], list[float]]:
    """A session of turns with about 1 KB of new text each, under a system prompt with tools."""
    talk = converse("You code. " * 300, body=TOOLS, **fields)
    records, times = [], []
    for number in range(turns):
        started = time.thread_time(), time.process_time()
        records.append(await talk.say(f"question {number} " * 40, f"answer {number} " * 30))
        times.append(time.process_time() - started[1])
    return records, times


@pytest.mark.parametrize("dialect", ["chat", "messages"])
async def test_fifty_turns_cost_a_fifteenth_of_storing_each_body(log: ExperienceLog, converse: Converse, dialect: str) -> None:
    records, _ = await grow(converse, 50, dialect=dialect)
    naive = sum(len(record.request) for record in records)
    stored = log.counts("s1")["stored_bytes"]
    assert stored * 15 <= naive, f"saving is {naive / stored:.1f}"
    assert [log.get("s1", record.id) for record in records] == records


async def test_translated_messages_are_shared_as_well(log: ExperienceLog, converse: Converse) -> None:
    talk = converse("You code. " * 300, dialect="responses")
    naive = 0
    for number in range(50):
        talk.fields["body"] = b""
        said = [*talk.messages, {"role": "user", "content": f"question {number} " * 40}]
        talk.fields["body"] = orjson.dumps({"input": [{"type": "message", **message} for message in said], **TOOLS})
        record = await talk.say(f"question {number} " * 40, f"answer {number} " * 30)
        naive += len(record.request) + len(orjson.dumps(record.messages))
        assert log.get("s1", record.id) == record
    assert log.counts("s1")["stored_bytes"] * 15 <= naive


async def test_a_first_turn_shares_prompt_and_tools_with_other_sessions(log: ExperienceLog, converse: Converse) -> None:
    system = "You code, carefully. " * 1000
    for number in range(10):
        await converse(system, body=TOOLS).say(f"task {number}")
    assert log.counts("s1")["stored_bytes"] < 2 * len(system)


@pytest.mark.parametrize("named", [True, False])
async def test_four_hundred_turns_cost_about_the_same_each(log: ExperienceLog, converse: Converse, named: bool) -> None:
    records, times = await grow(converse, 400, **({"session": "long"} if named else {}))
    early, late = statistics.median(times[20:80]), statistics.median(times[340:])
    # The transcript grows seventeenfold between the two; comparing it is all that may grow.
    assert late < 5 * early + 0.002, f"{early * 1e3:.2f} ms -> {late * 1e3:.2f} ms"
    started = time.process_time()
    assert log.get("s1", records[-1].id) == records[-1]
    assert time.process_time() - started < 0.5
    tree = log.session_tree("s1", "long" if named else records[0].id)
    assert [len(branch.turns) for branch in tree.branches] == [400]


async def test_records_that_come_together_find_their_places_as_one_after_the_other(tmp_path: Path, make: Make) -> None:
    """Conversations, retries, equal requests, named and unnamed, all in one transaction and each in its own."""
    ask, answer = {"role": "user", "content": "one"}, {"role": "assistant", "content": "hi there"}
    more, cut = {"role": "user", "content": "two"}, {"role": "user", "content": "three"}
    places: list[list[Any]] = []
    for together in (True, False):
        log = ExperienceLog.open(tmp_path / f"{together}.db")
        await log.scenarios.ensure("s1")
        await log.append(make("roll", "seen before"))
        records = [
            make("roll", "another sample"),
            make([ask], "hi there"),
            make([ask], None, complete=False, error="cut"),
            make([ask], "hi there", at=1_000_001.0),
            make([ask, answer, more], "ok", body=TOOLS),
            make([ask, {**answer, "content": "edited"}, more], "ok"),
            make([ask, answer, more, cut], None, complete=False, error="cut"),
            make([ask, answer, more, cut, {"role": "assistant", "content": "x"}, more]),
            *(make([ask], "hi there", session="named", at=at) for at in (5.0, 6.0, 100.0)),
            make([ask, answer, more], session="named", body=TOOLS),
            make("no tools", session="named"),
            make([], "nothing asked"),
        ]
        calls = [log.append(record) for record in records]
        if together:
            await asyncio.gather(*calls)
        else:
            for call in calls:
                await call
        known = {row.id: index for index, row in enumerate(log.page("s1"))}
        places.append(
            [
                (row.role, row.parent, row.retry_of, known.get(row.session or "", row.session), row.trainable_tokens)
                for row in log.page("s1")
            ]
        )
        lists = [(known.get(row.session, row.session), row.records, row.turns, row.output_tokens) for row in log.sessions("s1")]
        places[-1].append((lists, log.counts("s1")))
        log.close()
    assert places[0] == places[1]
    assert {place[0] for place in places[0][:-1]} == {"turn", "retry", "side"}


def test_looking_for_a_place_takes_one_index() -> None:
    connection = sqlite3.connect(":memory:")
    migrate(connection, Path())
    for statement in (*_FIND.values(), _seen(3)):
        plan = [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {statement}", (1,) * statement.count("?"))]
        assert any("INDEX records_links (chain=?" in step for step in plan), plan
        assert not [step for step in plan if "TEMP B-TREE" in step or step.startswith(("SCAN r", "SCAN s"))], plan
    connection.close()
