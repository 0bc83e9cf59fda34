"""Ids are unique across threads and forked processes."""

import os
from concurrent.futures import ThreadPoolExecutor

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


def test_bits_have_their_size_and_vary() -> None:
    chance = Chance()
    for count in (1, 7, 8, 74, 96):
        drawn = [chance.bits(count) for _ in range(2000)]
        assert max(drawn) < 1 << count
        assert max(drawn) >> count - 1 == 1, "the highest bit is used"
        assert len(set(drawn)) > (1 if count < 8 else 200)
