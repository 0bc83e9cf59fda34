"""What the writer remembers: rows that one statement inserts, and which ids may be stored already."""

import sqlite3

from hypothesis import given, settings
from hypothesis import strategies as st

from reef_cli.experience.held import OR_NULL, Held, Lately


@settings(deadline=None)
@given(st.lists(st.integers(0, 50), max_size=6))
def test_rows_are_inserted_in_order_however_many_there_are(counts: list[int]) -> None:
    connection = sqlite3.connect(":memory:")
    connection.execute("CREATE TABLE t (n INTEGER PRIMARY KEY, kind TEXT)")
    held = Held("t", "n, kind", kind="'x'")
    number = 0
    for count in counts:
        for _ in range(count):
            number += 1
            held.add((number,))
        assert len(held) == count
        held.insert(connection)
        assert len(held) == 0
    rows = connection.execute("SELECT n, kind FROM t ORDER BY rowid").fetchall()
    connection.close()
    assert rows == [(n, "x") for n in range(1, number + 1)]


def test_what_is_dropped_is_not_inserted() -> None:
    held = Held("t", "n")
    held.add((1,))
    held.clear()
    assert len(held) == 0


@settings(deadline=None)
@given(st.text(max_size=3), st.lists(st.text(max_size=3), max_size=30), st.text(max_size=3))
def test_an_id_that_may_be_stored_is_never_called_new(greatest: str, added: list[str], asked: str) -> None:
    lately = Lately(most=4)
    lately.reset(greatest)
    for one in added:
        lately.add(one)
    if asked in added or asked <= greatest:
        assert lately.maybe(asked)


def test_ids_that_grow_are_new_as_long_as_only_old_ones_are_forgotten() -> None:
    lately = Lately(most=4)
    lately.reset("b")
    for one in ("c1", "c3", "c2", "c5", "c4", "c6"):
        assert not lately.maybe(one)
        lately.add(one)
    assert lately.maybe("c1") and lately.maybe("c3")
    assert not lately.maybe("c7")


def test_a_0_stands_for_null_where_the_mark_says_so_and_nothing_else_does() -> None:
    connection = sqlite3.connect(":memory:")
    connection.execute("CREATE TABLE t (n INTEGER PRIMARY KEY, words TEXT, data BLOB, plain INTEGER)")
    held = Held("t", "n, words, data, plain", words=OR_NULL, data=OR_NULL)
    rows = [(1, 0, 0, 0), (2, "", b"", 0), (3, "0", b"0", None), (4, "x", b"x", 1)]
    for row in rows:
        held.add(row)
    held.insert(connection)
    stored = connection.execute("SELECT * FROM t ORDER BY n").fetchall()
    connection.close()
    assert stored == [(1, None, None, 0), *rows[1:]]
