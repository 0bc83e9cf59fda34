"""Ids are unique across threads and forked processes."""

import os
import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from reef_cli.core import ids
from reef_cli.core.ids import Chance, new_id, random_hex


def test_ids_of_many_threads_are_all_different_and_ordered_in_each() -> None:
    def some(_: int) -> list[str]:
        return [new_id() for _ in range(500)]

    with ThreadPoolExecutor(8) as pool:
        runs = list(pool.map(some, range(8)))
    assert all(run == sorted(run) for run in runs)
    assert len({one for run in runs for one in run}) == 4000
    assert all(one[12] == "7" and one[16] in "89ab" for run in runs for one in run), "UUID version 7"


def test_a_forked_child_draws_its_own() -> None:
    random_hex(24)  # something is left in the parent
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, random_hex(24).encode())
        os._exit(0)
    os.waitpid(child, 0)
    theirs = os.read(read, 100).decode()
    os.close(read)
    os.close(write)
    assert theirs != random_hex(24)
    assert len(theirs) == 24


def test_pieces_have_their_size_and_vary_where_they_may() -> None:
    for size in (1, 4, 16):
        chance = Chance(size)
        drawn = [chance.draw() for _ in range(1000)]
        assert all(re.fullmatch(f"[0-9a-f]{{{2 * size}}}", one) for one in drawn)
        assert {one[0] for one in drawn} == {one[-1] for one in drawn} == set("0123456789abcdef")
        assert len(set(drawn)) == len(drawn) or size == 1
    drawn = [Chance(2, b"\x0f\x30", b"\x70\x81").draw() for _ in range(300)]
    assert {one[0] + one[3] for one in drawn} == {"71"}
    assert ({one[1] for one in drawn}, {one[2] for one in drawn}) == (set("0123456789abcdef"), set("89ab"))


@pytest.mark.parametrize("digits", [1, 8, 24, 32])
def test_random_hex_has_as_many_digits_as_asked(digits: int) -> None:
    assert re.fullmatch(f"[0-9a-f]{{{digits}}}", random_hex(digits))


def test_ids_say_the_millisecond_and_take_each_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ids, "_last", "")
    clock = iter(range(2_000_000_000_000_000_000, 3_000_000_000_000_000_000, 1_000_000))
    monkeypatch.setattr(time, "time_ns", lambda: next(clock))
    made = [new_id() for _ in range(400)]
    assert [int(one[:12], 16) for one in made] == list(range(2_000_000_000_000, 2_000_000_000_400))
    assert {one[16] for one in made} == set("89ab")
    monkeypatch.setattr(time, "time_ns", lambda: 1_000_000)
    assert [int(new_id(), 16) - int(made[-1], 16) for _ in range(3)] == [1, 2, 3], "a clock that is set back"
