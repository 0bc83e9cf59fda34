"""The event stream: everything once, in order, and exactly resumable."""

import sqlite3
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reef_cli.core.errors import InvalidRequest
from reef_cli.core.types import Inference
from reef_cli.experience.events import events, tip
from reef_cli.experience.log import ExperienceLog
from reef_cli.experience.schema import MIGRATIONS

Make = Callable[..., Inference]
happenings = st.lists(
    st.tuples(st.sampled_from(["record", "job", "release"]), st.integers(0, 5), st.sampled_from("ab")), max_size=30
)


def database(happened: list[tuple[str, int, str]]) -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    for migration in MIGRATIONS:
        migration.apply(connection)
    for row, name in enumerate("ab", 1):
        connection.execute(
            "INSERT INTO scenarios (id, name, mode, paused, created_at) VALUES (?, ?, 'auto', 0, 0)", (row, name)
        )
    for number, (kind, at, scenario) in enumerate(happened):
        if kind == "record":
            connection.execute(
                "INSERT INTO records (id, scenario_id, kind, created_at, digest) VALUES (?, ?, 'report', ?, x'')",
                (f"x{number}", "ab".index(scenario) + 1, at),
            )
        elif kind == "job":
            connection.execute(
                "INSERT INTO job_events (job_id, scenario, at, state) VALUES (?, ?, ?, 's')", (f"x{number}", scenario, at)
            )
        else:
            connection.execute(
                "INSERT INTO release_events (release_id, scenario, at, event) VALUES (?, ?, ?, 'e')",
                (f"x{number}", scenario, at),
            )
    return connection


@given(happenings, st.integers(1, 7), st.none() | st.sampled_from("ab"), st.data())
def test_any_split_sees_every_event_once(
    happened: list[tuple[str, int, str]], limit: int, scenario: str | None, data: st.DataObject
) -> None:
    connection = database(happened)
    whole, end = events(connection, None, 1000, scenario)
    wanted = {f"x{n}" for n, (_, _, name) in enumerate(happened) if scenario in (None, name)}
    assert [event.data.get("id") or event.data.get("job_id") or event.data.get("release_id") for event in whole] != [None]
    seen, cursor = [], None
    while True:
        page, following = events(connection, cursor, limit, scenario)
        if not page:
            break
        seen += page
        # A client may lose the connection after any event and resume with that event's own cursor.
        cursor = data.draw(st.sampled_from([following, page[-1].cursor]))
    assert seen == whole
    assert {event.data.get("id") or event.data.get("job_id") or event.data.get("release_id") for event in seen} == wanted
    assert events(connection, end, 10, scenario)[0] == []
    connection.close()


@given(happenings, happenings)
def test_the_tip_is_after_everything_and_before_what_comes(
    first: list[tuple[str, int, str]], later: list[tuple[str, int, str]]
) -> None:
    connection = database(first)
    cursor = tip(connection)
    assert events(connection, cursor, 10, None)[0] == []
    connection.close()
    grown = database(first + later)
    assert len(events(grown, cursor, 1000, None)[0]) == len(later)
    grown.close()


async def test_records_jobs_and_releases_arrive_in_order(log: ExperienceLog, make: Make) -> None:
    start = log.tip()
    record = make("a", at=1.0)
    await log.append(record)
    await log.write(
        lambda connection: (
            connection.execute(
                "INSERT INTO job_events (job_id, scenario, at, state, detail) VALUES ('j', 's1', 2, 'training', '{\"n\":1}')"
            ).rowcount
        )
    )
    await log.write(
        lambda connection: (
            connection.execute(
                "INSERT INTO release_events (scenario, release_id, at, event) VALUES ('s1', 'r1', 3, 'published')"
            ).rowcount
        )
    )
    found, cursor = log.events(start)
    assert [(event.kind, event.scenario) for event in found] == [("record", "s1"), ("job", "s1"), ("release", "s1")]
    assert found[0].data["id"] == record.id
    assert found[1].data == {"job_id": "j", "state": "training", "detail": {"n": 1}}
    assert cursor == found[-1].cursor == log.tip()


@pytest.mark.parametrize("cursor", ["", "1", "1.2", "1.2.3.4", "a.b.c", "-1.0.0", "1.2.²", "9" * 30 + ".0.0"])
def test_malformed_cursors_are_refused(log: ExperienceLog, cursor: str) -> None:
    with pytest.raises(InvalidRequest):
        log.events(cursor)
