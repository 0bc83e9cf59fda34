"""Pure parts of the dashboard: facts from JSON of any age, curves, what a rollback goes back to."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reef_cli.tui.curve import bar, chart, sparkline
from reef_cli.tui.facts import Snapshot, record_rows, release_rows, scenario_rows, server_line
from reef_cli.tui.job import job_text
from tests.control.fake_reef import record, release

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=10,
)
FIELDS = (
    "scenario",
    "name",
    "state",
    "done",
    "total",
    "head",
    "rewards",
    "counts",
    "job",
    "last_outcome",
    "evidence",
    "step",
    "score",
)


@given(st.lists(st.fixed_dictionaries(dict.fromkeys(FIELDS, json_values)), max_size=3))
def test_facts_of_any_shape_are_read_without_an_error(rows: list[dict[str, object]]) -> None:
    for scenario in scenario_rows({"scenarios": rows}):
        job_text(scenario, 40, 12)
    release_rows({"releases": rows})
    record_rows({"records": rows})
    server_line({"engine": rows}, "u")


@pytest.mark.parametrize("broken", [None, [], "x", {"releases": 5}, {"releases": [1, None]}])
def test_answers_that_are_no_lists_are_empty(broken: object) -> None:
    assert release_rows(broken) == ()


def test_head_held_and_previous() -> None:
    rows = [
        release(4, "d", pending=True),
        release(3, "c", current=True),
        release(2, "c", release_id="r2-same"),
        release(1, "b", restorable=False),
        release(0, "a"),
    ]
    snapshot = Snapshot(selected="default", releases=release_rows({"releases": rows}))
    assert snapshot.head().release_id.startswith("r3")  # type: ignore[union-attr]
    assert snapshot.held().release_id.startswith("r4")  # type: ignore[union-attr]
    assert snapshot.previous().release_id.startswith("r0")  # type: ignore[union-attr]
    assert replace(snapshot, releases=()).previous() is None


def test_records_come_in_order_with_their_text() -> None:
    rows = record_rows({"records": [record(2, error="aborted"), record(1)]})
    assert [row.sequence for row in rows] == [1, 2]
    assert rows[1].text == "aborted"
    assert rows[1].failed


def test_curves() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 1], 2) == "▁█"
    assert sparkline([], 5) == ""
    assert chart([0.0, 1.0], 10, 2) == [" █", "▁█"]
    assert bar(1, 4, 8) == "━━──────"
    assert bar(9, 4, 4) == "━━━━"
    assert bar(1, 0, 4) == "────"


@given(st.lists(st.floats(-1e6, 1e6), max_size=50), st.integers(0, 60), st.integers(0, 10))
def test_curves_fit_their_box(values: list[float], width: int, height: int) -> None:
    assert len(sparkline(values, width)) == min(len(values), width)
    lines = chart(values, width, height)
    assert len(lines) == (height if values and width and height else 0)
    assert all(len(line) == min(len(values), width) for line in lines)
