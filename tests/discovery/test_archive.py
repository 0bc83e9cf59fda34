"""The archive: what is written is there after a kill, visits follow the rollouts, and a run is never mixed with another."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from reef_cli.core.errors import AlreadyRunning, ConfigError, StorageError
from reef_cli.discovery.archive import Archive, Rollout
from reef_cli.discovery.problem import Made, Verdict


def found(value: float, text: str = "line") -> tuple[Made, Verdict]:
    return Made([[0.5, 0.5, value]], text, "short"), Verdict(True, "valid", value, value - 1e-13)


def attempt(step: int, group: int, rollout: int, parent: int, value: float | None) -> Rollout:
    valid = value is not None
    return Rollout(step, group, rollout, parent, "text", value or 0.0, valid, "valid" if valid else "not_a_line", f"r{rollout}")


def seeded(path: Path, *values: float) -> Archive:
    archive = Archive(path)
    archive.begin({"problem": "packing-26", "space": "lines"})
    archive.add_starts([found(value) for value in values])
    return archive


def test_a_step_adds_visits_to_the_parent_and_all_above_it(tmp_path: Path) -> None:
    archive = seeded(tmp_path / "a.db", 1.0, 1.1)
    step = archive.next_step(2, "r0")
    assert (step.step, step.parents) == (1, (2, 1)), "the better start first"
    archive.record(attempt(1, 0, 0, 2, 1.5), found(1.5))
    archive.record(attempt(1, 0, 1, 2, None), None)
    archive.record(attempt(1, 1, 0, 1, 1.2), found(1.2))
    assert {node.id for node in archive.nodes()[0]} == {1, 2}, "children join when the step is over"
    archive.commit(1, "r1", {"trained": True})
    second = archive.next_step(2, "r1")
    assert second.step == 2
    archive.record(attempt(2, 0, 0, 3, 1.6), found(1.6))
    archive.commit(2, "r2", {})
    nodes, total = archive.nodes()
    by_id = {node.id: node for node in nodes}
    assert total == 4
    assert (by_id[2].visits, by_id[3].visits, by_id[1].visits, by_id[5].visits) == (3, 1, 1, 0)
    assert (by_id[2].best_child, by_id[3].best_child, by_id[5].best_child) == (1.5, 1.6, None)
    assert by_id[5].ancestors == {2, 3} and by_id[2].initial and not by_id[3].initial
    best = archive.best()
    assert best is not None and best.value == 1.6
    assert [(row["step"], row["rollouts"], row["valid"], row["top"]) for row in archive.history()] == [
        (1, 3, 2, 1.5),
        (2, 1, 1, 1.6),
    ]
    assert [row["best"] for row in archive.history()] == pytest.approx([1.5, 1.6])
    archive.close()


def test_two_children_per_parent_stay_over_all_time_and_starts_always(tmp_path: Path) -> None:
    archive = seeded(tmp_path / "a.db", 1.0)
    for step, values in ((1, (1.3, 1.2, 1.1)), (2, (1.25, 1.4))):
        archive.next_step(1, None)
        for i, value in enumerate(values):
            archive.record(attempt(step, 0, i, 1, value), found(value))
        archive.commit(step, None, {})
    assert sorted(node.value for node in archive.nodes()[0]) == [1.0, 1.3, 1.4]
    archive.close()


def test_best_of_n_always_starts_from_the_starts(tmp_path: Path) -> None:
    archive = seeded(tmp_path / "a.db", 1.0, 1.1)
    archive.next_step(3, None, initial_only=True)
    archive.record(attempt(1, 0, 0, 1, 2.0), found(2.0))
    archive.commit(1, None, {})
    assert archive.next_step(3, None, initial_only=True).parents == (1, 2, 1)
    archive.close()


def test_an_open_step_is_taken_up_again_with_the_same_parents(tmp_path: Path) -> None:
    archive = seeded(tmp_path / "a.db", 1.0, 1.1)
    first = archive.next_step(2, "r0", detail={"samples_done": 8})
    archive.record(attempt(1, 0, 0, 2, 9.0), found(9.0))
    archive.close()
    again = Archive(tmp_path / "a.db")
    assert again.next_step(2, "r5") == first and again.next_step(2, "r5").detail == {"samples_done": 8}
    again.record(attempt(1, 0, 0, 2, 3.0), found(3.0))
    (kept,) = again.rollouts(1)
    assert kept.score == 9.0 and kept.state is not None, "a try written before stays as it was"
    assert again.best() == again.state(kept.state)
    again.reported(kept)
    assert again.rollouts(1)[0].reported
    again.close()


def test_a_run_is_bound_to_its_facts_and_to_one_process(tmp_path: Path) -> None:
    archive = seeded(tmp_path / "a.db", 1.0)
    archive.begin({"problem": "packing-26", "space": "lines"})
    with pytest.raises(ConfigError, match="packing-26"):
        archive.begin({"problem": "packing-32"})
    with pytest.raises(AlreadyRunning):
        Archive(tmp_path / "a.db")
    archive.close()
    Archive(tmp_path / "a.db").close()


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.db").write_bytes(b"no database" * 100)
    for _ in range(2):
        with pytest.raises(StorageError, match="cannot be opened"):
            Archive(tmp_path / "a.db")


_WRITER = """
import sys
from pathlib import Path
from tests.discovery.test_archive import attempt, found, seeded
archive = seeded(Path(sys.argv[1]), 1.0)
archive.next_step(1, None)
for i in range(100000):
    archive.record(attempt(1, 0, i, 1, 1.0 + i), found(1.0 + i))
    print(i, flush=True)
"""


def test_a_kill_loses_no_solution_that_was_acknowledged(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    child = subprocess.Popen([sys.executable, "-c", _WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    told = -1
    for line in child.stdout:
        told = int(line)
        if told >= 40:
            os.kill(child.pid, signal.SIGKILL)
            break
    child.wait()
    archive = Archive(path)
    rows = archive.rollouts(1)
    assert len(rows) >= told + 1 and [row.rollout for row in rows] == list(range(len(rows)))
    states = [archive.state(row.state) for row in rows if row.state is not None]
    assert [state.value for state in states] == [1.0 + i for i in range(len(rows))], "no rollout without its solution"
    best = archive.best()
    assert best is not None and best.value == float(len(rows))
    assert archive.next_step(1, None).step == 1
    archive.close()
