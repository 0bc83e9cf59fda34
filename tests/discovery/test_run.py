"""A run: the grid, what counts as a discovery, resuming after cuts at every place, pairing with the head, and outages."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from reef_cli.core.errors import ConfigError, EvaluationError, HeadMoved, UpstreamError
from reef_cli.discovery.archive import Archive
from reef_cli.discovery.problem import Ask
from reef_cli.discovery.run import KNOWN, Plan, Progress, Run
from tests.discovery.toy import Memory, Numbers

PLAN = Plan("test", 2, 3, concurrency=2)


def climbing(ask: Ask, seed: int) -> str:
    return f"{0.001 + seed % 1000 / 1000:.3f}"


@pytest.fixture
def archive(tmp_path: Path) -> Iterator[Archive]:
    with_file = Archive(tmp_path / "run" / "archive.db")
    yield with_file
    with_file.close()


def begun(tmp_path: Path, archive: Archive, served: Memory, plan: Plan = PLAN, watched: list[Progress] | None = None) -> Run:
    problem = Numbers(tmp_path)
    run = Run(problem, problem.space("add"), served, archive, plan, (lambda at: None) if watched is None else watched.append)
    run.begin()
    return run


def test_a_step_is_a_whole_grid_reported_in_its_places_and_committed_with_the_new_head(
    tmp_path: Path, archive: Archive
) -> None:
    served, watched = Memory(climbing, 6), []
    run = begun(tmp_path, archive, served, watched=watched)
    row = run.step()
    assert set(served.reports) == {(1, g, r) for g in range(2) for r in range(3)} and served.asked == 6
    assert (row["rollouts"], row["valid"], row["head"], row["trained"]) == (6, 6, "r1", True)
    best = archive.best()
    assert best is not None and best.value == row["best"] == row["top"] > 1.1 and not best.initial
    assert watched[-1].total == 6 and {at.phase for at in watched} >= {"search"}
    again = run.step()
    assert again["step"] == 2 and again["head"] == "r2" and again["best"] > row["best"], "children are built upon"
    assert archive.origin(best.id) is not None


def test_an_invalid_answer_scores_nothing_and_is_a_visit(tmp_path: Path, archive: Archive) -> None:
    served = Memory(lambda ask, seed: ("hm", "200", "0.5")[seed % 3], 6)
    begun(tmp_path, archive, served).step()
    reasons = {row.reason: row.score for row in archive.rollouts(1)}
    assert reasons["no_number"] == 0 and reasons["out of range"] == 0
    nodes, total = archive.nodes()
    assert total == 6 and sum(node.visits for node in nodes if node.initial) == 6


def test_a_copy_of_a_known_solution_is_no_discovery(tmp_path: Path, archive: Archive) -> None:
    served = Memory(lambda ask, seed: "0", 6)
    row = begun(tmp_path, archive, served).step()
    tries = archive.rollouts(1)
    assert {(one.reason, one.score, one.valid, one.state) for one in tries} == {(KNOWN, 0.0, True, None)}
    assert row["valid"] == 6 and len(archive.nodes()[0]) == 2 and set(served.reports.values()) == {(0.0, True)}


def test_the_same_seed_makes_the_same_run(tmp_path: Path) -> None:
    texts = []
    for name in ("a", "b"):
        archive = Archive(tmp_path / name / "archive.db")
        begun(tmp_path, archive, Memory(climbing, 6)).step()
        texts.append([(row.text, row.score) for row in archive.rollouts(1)])
        archive.close()
    assert texts[0] == texts[1]


@pytest.mark.parametrize("cut", [1, 4])
def test_a_run_cut_while_searching_asks_only_for_what_is_missing(tmp_path: Path, archive: Archive, cut: int) -> None:
    def failing(ask: Ask, seed: int) -> str:
        if served.asked >= cut:
            raise UpstreamError("gone")
        return climbing(ask, seed)

    served = Memory(failing, 6)
    with pytest.raises(UpstreamError):
        begun(tmp_path, archive, served).step()
    kept = len(archive.rollouts(1))
    assert cut <= kept < 6 and not served.reports
    healthy = Memory(climbing, 6)
    assert begun(tmp_path, archive, healthy).step()["rollouts"] == 6
    assert healthy.asked == 6 - kept and len(healthy.reports) == 6


def test_a_run_cut_after_its_reports_reports_again_and_goes_on(tmp_path: Path, archive: Archive) -> None:
    class Dying(Memory):
        def await_trained(self, *rest: object, **more: object) -> object:  # type: ignore[override]
            raise UpstreamError("gone")

    served = Dying(climbing, 6)
    with pytest.raises(UpstreamError):
        begun(tmp_path, archive, served).step()
    healthy = Memory(climbing, 6)
    healthy.releases = 1  # the training went on meanwhile and moved the head
    row = begun(tmp_path, archive, healthy).step()
    assert healthy.asked == 0 and len(healthy.reports) == 6 and row["committed"] and row["head"] == "r1"


def test_another_head_than_the_archives_is_refused_unless_adopted(tmp_path: Path, archive: Archive) -> None:
    begun(tmp_path, archive, Memory(climbing, 6)).step()
    moved = Memory(climbing, 6)
    moved.releases = 7
    problem = Numbers(tmp_path)
    run = Run(problem, problem.space("add"), moved, archive, PLAN)
    with pytest.raises(HeadMoved, match=r"r1.*r7"):
        run.begin()
    moved.twins = {"r1", "r7"}
    run.begin()  # a full gate has promoted the same weights
    moved.twins = set()
    run.begin(adopt_head=True)
    run.begin()


def test_a_grid_that_the_recipe_refuses_is_not_waited_for(tmp_path: Path, archive: Archive) -> None:
    served = Memory(climbing, 6)
    served.refuse = "outside_the_grid"
    row = begun(tmp_path, archive, served).step()
    assert row["untrained"] == {"outside_the_grid": 6} and served.waited == 0 and row["committed"]


def test_without_learning_scores_are_reported_and_nothing_is_awaited(tmp_path: Path, archive: Archive) -> None:
    served = Memory(climbing, 6)
    run = begun(tmp_path, archive, served, Plan("test", 2, 3, learn=False))
    run.step()
    assert served.waited == 0 and {learn for _, learn in served.reports.values()} == {False}


def test_best_of_n_never_builds_on_what_it_found(tmp_path: Path, archive: Archive) -> None:
    run = begun(tmp_path, archive, Memory(climbing, 6), Plan("test", 2, 3, initial_only=True))
    run.step()
    run.step()
    starts = {node.id for node in archive.nodes()[0] if node.initial}
    assert {row.parent for step in (1, 2) for row in archive.rollouts(step)} == starts


def test_a_run_keeps_its_shape(tmp_path: Path, archive: Archive) -> None:
    begun(tmp_path, archive, Memory(climbing, 6)).step()
    with pytest.raises(ConfigError, match="rollouts"):
        begun(tmp_path, archive, Memory(climbing, 8), Plan("test", 2, 4))


def test_a_verifier_that_breaks_stops_the_run_and_loses_nothing(tmp_path: Path, archive: Archive) -> None:
    problem = Numbers(tmp_path)
    run = Run(problem, problem.space("add"), Memory(climbing, 6), archive, PLAN)
    run.begin()
    script = Path(problem.verifier[0])
    good = script.read_text()
    script.write_text("raise SystemExit(9)")
    with pytest.raises(EvaluationError):
        run.step()
    script.write_text(good)
    again = Run(problem, problem.space("add"), Memory(climbing, 6), archive, PLAN)
    again.begin()
    assert again.step()["rollouts"] == 6
