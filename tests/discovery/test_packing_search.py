"""The packing search space: what a line means, that solvers improve and never cheat, and that the seed fixes the result."""

from typing import Any

import numpy as np
import pytest

from reef_cli.core.errors import ConfigError
from reef_cli.discovery.packing.check import check
from reef_cli.discovery.packing.circles import PackingProblem
from reef_cli.discovery.packing.geometry import Packing, best_radii, packing, polish, shrunk, slsqp
from reef_cli.discovery.packing.interior import settle
from reef_cli.discovery.packing.lines import SAME_BELOW, LineSpace, even_rows
from reef_cli.discovery.packing.moves import Rows, Shake, change, gaps, lay_out, parse
from reef_cli.discovery.problem import State, Unusable

FIVE = np.array([[i, j] for i in (0.1, 0.3, 0.5, 0.7, 0.9) for j in (0.1, 0.3, 0.5, 0.7, 0.9)])


def state(made: Any, value: float, initial: bool) -> State:
    return State(1, None, value, initial, made.solution, made.text)


def test_the_best_radii_of_a_grid_with_a_gap_are_the_known_ones() -> None:
    found = best_radii(np.vstack([FIVE, [[0.2, 0.2]]]))
    assert found.total == pytest.approx(2.541421, abs=1e-6)
    assert check(found.rows(), 26, 1e-12).valid


def test_polishing_two_circles_reaches_the_optimum_from_anywhere() -> None:
    for centres in ([[0.3, 0.4], [0.6, 0.9]], [[0.1, 0.9], [0.8, 0.3]]):
        assert polish(np.array(centres)).total == pytest.approx(0.585786, abs=1e-6)


def test_polish_and_slsqp_agree_that_a_polished_packing_is_a_local_optimum() -> None:
    start = np.random.default_rng(3).uniform(0.05, 0.95, (12, 2))
    found = polish(start)
    assert found.total > best_radii(start).total + 0.1
    assert slsqp(found).total == pytest.approx(found.total, abs=1e-7)
    assert check(found.rows(), 12, 1e-12).valid and check(slsqp(found).rows(), 12, 1e-12).valid


def test_slsqp_improves_a_rough_start_and_stays_a_packing() -> None:
    start = best_radii(np.random.default_rng(5).uniform(0.05, 0.95, (8, 2)))
    found = slsqp(start)
    assert found.total > start.total + 0.05 and check(found.rows(), 8, 1e-12).valid


def test_shrinking_takes_every_overlap_off() -> None:
    rough = Packing(FIVE, np.full(25, 0.1 + 1e-6))
    assert not check(rough.rows(), 25, 1e-12).valid
    assert check(shrunk(rough).rows(), 25, 1e-12).valid and shrunk(rough).total > 2.5 - 1e-4


def test_settling_reaches_exact_optima_and_never_overlaps() -> None:
    for n, best in ((1, 0.5), (2, 2 - 2**0.5), (5, 1 + (2**0.5 - 1) / 4)):
        totals = []
        for seed in range(6):
            found = settle(np.random.default_rng(seed).uniform(0.0, 1.0, (n, 2)))
            assert check(found.rows(), n, 0.0).valid  # strictly inside: no tolerance
            totals.append(found.total)
        assert max(totals) == pytest.approx(best, abs=1e-6)


def test_what_settling_reaches_polish_cannot_improve() -> None:
    for seed in range(4):
        found = settle(np.random.default_rng(seed).uniform(0.05, 0.95, (12, 2)))
        assert polish(found.centres).total - found.total == pytest.approx(0.0, abs=1e-9)
        assert slsqp(found).total == pytest.approx(found.total, abs=1e-7)


@pytest.mark.parametrize("place", [0.0, 0.5, 1.0])
def test_settling_takes_circles_in_one_place_apart(place: float) -> None:
    found = settle(np.full((7, 2), place))
    assert check(found.rows(), 7, 0.0).valid and found.total > 1.2


@pytest.mark.parametrize(("n", "line"), [(26, " 5 5 6 5 5"), (32, " 5 6 5 6 5 5")])
def test_settling_finds_sums_as_good_as_polishing_does(n: int, line: str) -> None:
    """24 tries from the same starts: what replaced polishing inside the walks is no worse on average."""
    parent = State(0, None, 0.0, True, [])
    sums = {
        improve: np.mean([check(LineSpace(n, improve).make(parent, line, seed).solution, n).strict_total for seed in range(24)])
        for improve in (polish, settle)
    }
    assert sums[settle] >= sums[polish]


@pytest.mark.parametrize(
    ("line", "move"),
    [
        ("ROWS 5 5 6 5 5", Rows((5, 5, 6, 5, 5))),
        ("ROWS 5 6 5 6 5 SHIFT 4", Rows((5, 6, 5, 6, 5), 4)),
        ("  ROWS   7 7 6  6 ", Rows((7, 7, 6, 6))),
        ("SHAKE 3", Shake(3)),
        ("SHAKE 6 AREA 9", Shake(6, 9)),
        ("SHAKE 0 MOVE 4 17", Shake(0, None, (4, 17))),
        ("SHAKE 1 AREA 2 MOVE 3 SWAP 2 20", Shake(1, 2, (3,), (2, 20))),
    ],
)
def test_lines_are_read(line: str, move: Rows | Shake) -> None:
    assert parse(line, 26) == move


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("", "not_a_line"),
        ("ROWS", "not_a_line"),
        ("ROWS five", "not_a_line"),
        ("ROWS 5 5 6 5 5 because", "not_a_line"),
        ("SHAKE 12", "not_a_line"),
        ("SHAKE 1 AREA 0", "not_a_line"),
        ("ROWS 1 1 1", "rows_far_from_n"),
        ("ROWS 0 13 13", "rows_out_of_range"),
        ("ROWS 50 50", "rows_out_of_range"),
        ("SHAKE 1 MOVE 27", "ranks_out_of_range"),
        ("SHAKE 1 MOVE 3 3", "ranks_out_of_range"),
        ("SHAKE 1 MOVE 0", "ranks_out_of_range"),
        ("SHAKE 1 MOVE 1 2 3 4", "too_many_moved"),
    ],
)
def test_what_is_no_line_has_a_stable_reason(line: str, reason: str) -> None:
    with pytest.raises(Unusable, match=reason):
        parse(line, 26)


@pytest.mark.parametrize("counts", [(5, 5, 6, 5, 5), (4, 4, 4, 4, 4), (6, 6, 6, 6, 6)])
def test_rows_are_filled_up_or_thinned_to_n(counts: tuple[int, ...]) -> None:
    centres = lay_out(Rows(counts), 26, 0.01, np.random.default_rng(0))
    assert centres.shape == (26, 2) and best_radii(centres).total > 1.5


def test_a_shift_moves_every_second_row() -> None:
    plain, moved = (lay_out(Rows((3, 3, 3), shift), 9, 0.0, np.random.default_rng(0)) for shift in (0, 5))
    assert np.allclose(plain[:3], moved[:3]) and np.allclose(moved[3:6, 0] - plain[3:6, 0], 5 / 20 / 3)


def test_gaps_are_where_the_room_is() -> None:
    spots, room = gaps(Packing(np.array([[0.25, 0.25]]), np.array([0.25])))
    assert np.allclose(spots[0], [0.71, 0.71], atol=0.06) and room[0] == max(room) and room[0] > 0.25


def test_moves_do_what_they_say() -> None:
    at = polish(np.random.default_rng(1).uniform(0.05, 0.95, (9, 2)))
    order = np.argsort(at.radii, kind="stable")
    generator = np.random.default_rng(0)
    swapped = change(Shake(0, swapped=(1, 9)), at, generator)
    assert np.allclose(swapped[order[0]], at.centres[order[8]]) and np.allclose(swapped[order[8]], at.centres[order[0]])
    area = change(Shake(5, area=1), at, generator)
    near = np.hypot(*(at.centres - 1 / 6).T) < 0.3
    assert (np.abs(area - at.centres).max(1) > 0).tolist() == near.tolist() and near.any()
    moved = change(Shake(0, moved=(1,)), at, generator)
    rest = np.delete(at.centres, order[0], 0)
    assert np.allclose(moved[:8], rest) and np.hypot(*(moved[8] - at.centres[order[0]])) > 0.05


@pytest.mark.parametrize("n", [1, 2, 5, 26, 32, 33])
def test_starts_are_valid_rows_of_n_circles(n: int) -> None:
    problem = PackingProblem(n)
    starts = problem.starts(3, seed=0)
    assert len(starts) == 3 and all(check(made.solution, n).valid for made in starts)
    assert all(sum(counts) == n and min(counts) > 0 for counts in even_rows(n))


def test_a_line_and_a_seed_make_one_packing() -> None:
    problem = PackingProblem(9)
    space = problem.space("lines")
    start = state(problem.starts(1, 0)[0], 1.0, True)
    one, two, other = (space.make(start, " 3 3 3", seed) for seed in (1, 1, 2))
    assert one == two and one.text == "ROWS 3 3 3" and other.solution != one.solution
    found = state(one, check(one.solution, 9).total, False)
    better = space.make(found, " 2 SWAP 1 4\nSHAKE 9", 4)
    assert better.text == "SHAKE 2 SWAP 1 4" and check(better.solution, 9).valid


def test_a_walk_goes_on_from_what_it_found_and_brings_the_best_back() -> None:
    """With one step it is the space of lines; the longer walk from the same seed begins with that step."""
    rows = best_radii(lay_out(Rows((3, 3)), 6, 0.0, np.random.default_rng(0)))
    start = polish(rows.centres)
    parent = State(1, 0, start.total, False, start.rows())
    one, walk = LineSpace(6), LineSpace(6, walk=12)
    assert (one.name, walk.name) == ("lines", "walks") and PackingProblem(6).space("walks").name == "walks"
    for seed in range(4):
        step = packing(one.make(parent, " 6", seed).solution).total
        made = packing(walk.make(parent, " 6", seed).solution).total
        new = [total for total in (step, made) if abs(total - start.total) > SAME_BELOW]
        assert made >= max(new, default=0.0) - 1e-12
    layouts = [packing(space.make(State(0, None, 0.0, True, rows.rows()), " 3 3", 7).solution).total for space in (one, walk)]
    assert layouts[1] >= layouts[0]


def test_each_kind_of_state_has_its_own_word() -> None:
    problem = PackingProblem(26)
    space, made = problem.space("lines"), problem.starts(1, 0)[0]
    assert space.ask(state(made, 2.5, True)).prompt.endswith("\nROWS")
    assert space.ask(state(made, 2.6, False)).prompt.endswith("\nSHAKE")
    for text, initial in ((" 3 AREA 2 ROWS 5", True), ("", True), (" 5 5 6 5 5", False)):
        with pytest.raises(Unusable):
            space.make(state(made, 2.5, initial), text, 0)


def test_the_prompt_tells_no_record() -> None:
    problem = PackingProblem(26)
    prompt = problem.space("lines").ask(state(problem.starts(1, 0)[0], 2.5, True)).prompt
    assert "2.63" not in prompt + problem.statement and "2.5000" in prompt and "2.93" not in prompt


def test_impossible_problems_are_named() -> None:
    for wrong in ({"n": 0}, {"n": 1000}, {"tolerance": -1.0}, {"tolerance": 0.1}):
        with pytest.raises(ConfigError):
            PackingProblem(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no search space"):
        PackingProblem(26).space("dreams")
