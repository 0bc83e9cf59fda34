"""The verifier of packings: which numbers count, under which tolerance, strictly, and in a process of its own."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from reef_cli.core.errors import EvaluationError
from reef_cli.discovery.packing import check as module
from reef_cli.discovery.packing.check import check, overlaps, strict_radii
from reef_cli.discovery.packing.circles import PackingProblem
from reef_cli.discovery.verify import Limits, verify

ROOT2 = math.sqrt(2)
GRID = [[0.1 + 0.2 * i, 0.1 + 0.2 * j, 0.1] for i in range(5) for j in range(5)] + [[0.2, 0.2, 0.1 * (ROOT2 - 1)]]
INFLATED = [[x, y, r + 2.5e-7] for x, y, r in GRID]
CORNER = 1 / (2 + ROOT2)
PAIR = [[CORNER, CORNER, CORNER], [1 - CORNER, 1 - CORNER, CORNER]]


@pytest.mark.parametrize(("tolerance", "valid"), [(0.0, False), (1e-12, True), (1e-7, True), (1e-6, True)])
def test_the_grid_with_one_circle_in_a_gap(tolerance: float, valid: bool) -> None:
    found = check(GRID, 26, tolerance)
    assert found.valid is valid
    if valid:
        assert found.total == pytest.approx(2.541421, abs=1e-6)
        assert 0 < found.total - found.strict_total < 1e-12


@pytest.mark.parametrize(("tolerance", "valid"), [(0.0, False), (1e-12, False), (1e-7, False), (1e-6, True)])
def test_radii_inflated_by_a_quarter_millionth_pass_only_a_millionth(tolerance: float, valid: bool) -> None:
    found = check(INFLATED, 26, tolerance)
    assert found.valid is valid
    if valid:
        assert found.total == pytest.approx(2.541428, abs=1e-6)
        assert found.strict_total < 2.541422, "the strict sum takes the inflation off again"


def test_an_exact_optimum_touches_and_needs_the_tolerance() -> None:
    assert not check(PAIR, 2, 0.0).valid
    found = check(PAIR, 2, 1e-12)
    assert found.valid and found.total == pytest.approx(0.585786, abs=1e-6)


def test_one_circle_fills_half() -> None:
    found = check([[0.5, 0.5, 0.5]], 1, 0.0)
    assert (found.valid, found.total, found.strict_total, found.exact) == (True, 0.5, 0.5, True)


def test_strict_radii_overlap_nowhere_and_are_not_smaller_than_needed() -> None:
    shrink, radii = strict_radii([(x, y, r) for x, y, r in GRID])
    strict = [(x, y, r) for (x, y, _), r in zip(GRID, radii, strict=True)]
    assert not overlaps(strict) and 0 < shrink <= 1e-15
    assert overlaps([(0.5, 0.5, 0.25), (0.5, 1 - 2**-53, 2**-53), (0.5 + 2**-30, 0.5, 0.25)])


def test_overlap_below_the_resolution_of_square_roots_is_seen() -> None:
    """Distance 0.5 against radii that are one unit in the last place too large together."""
    larger = math.nextafter(0.25, 1)
    assert math.hypot(0.5) - 0.25 - larger >= -1e-16
    assert not overlaps([(0.25, 0.5, 0.25), (0.75, 0.5, 0.25)])
    assert overlaps([(0.25, 0.5, 0.25), (0.75, 0.5, larger)])


@pytest.mark.parametrize(
    "solution",
    [
        GRID[:-1],
        [*GRID[:-1], [0.2, 0.2, math.nan]],
        [*GRID[:-1], [0.2, math.inf, 0.0]],
        [*GRID[:-1], [0.2, 0.2, -1e-9]],
        [*GRID[:-1], [0.2, 0.2, "0.01"]],
        [*GRID[:-1], [0.2, 0.2, True]],
        [*GRID[:-1], [0.2, 0.2, 1j]],
        [*GRID[:-1], [0.2, 0.2, 10**400]],
        [*GRID[:-1], [0.2, 0.2]],
        [*GRID[:-1], "0.2"],
        [*GRID[:-1], [-1e-13, 0.2, 0.0]],
        {"circles": GRID},
        "circles",
        None,
    ],
)
def test_what_is_no_packing_is_invalid_and_worth_nothing(solution: Any) -> None:
    found = check(solution, 26, 1e-6)
    assert (found.valid, found.total, found.strict_total) == (False, 0.0, 0.0) and found.reason


SCRIPT = Path(module.__file__)


def test_the_verifier_runs_in_a_process_of_its_own() -> None:
    found = verify(PackingProblem(26).verifier, GRID)
    assert found.valid and found.value == pytest.approx(2.541421, abs=1e-6) and found.strict < found.value
    assert found.details["shrink"] > 0 and len(found.details["radii"]) == 26


@pytest.mark.parametrize("raw", [[[0.5, 0.5, math.nan]], [[0.5, 0.5, 1e308 * 10]], {"sum": 9}, [[0.5, 0.5, "9"]]])
def test_numbers_that_are_none_come_back_as_a_verdict(raw: Any) -> None:
    assert not verify((SCRIPT, "1", "1e-6"), raw).valid


def test_a_reported_sum_is_never_believed() -> None:
    assert verify((SCRIPT, "1", "0"), [[0.5, 0.5, 0.25]]).value == 0.25
    assert not verify((SCRIPT, "1", "0"), {"circles": [[0.5, 0.5, 0.25]], "sum": 5.0}).valid


def test_the_tolerance_is_a_setting() -> None:
    assert not verify(PackingProblem(26, 0.0).verifier, GRID).valid
    assert verify(PackingProblem(26, 1e-6).verifier, INFLATED).valid


def script(tmp_path: Path, text: str) -> tuple[Path]:
    path = tmp_path / "verifier.py"
    path.write_text(text)
    return (path,)


def test_a_verifier_has_limits(tmp_path: Path) -> None:
    slow = verify(script(tmp_path, "while True: pass"), [], Limits(seconds=1.0))
    assert not slow.valid and ("within 1 s" in slow.reason or "signal" in slow.reason)
    greedy = verify(script(tmp_path, "x = 'a' * (1 << 32)"), [], Limits(memory_bytes=1 << 28))
    assert not greedy.valid and "memory" in greedy.reason


def test_a_broken_verifier_is_an_outage_and_no_score(tmp_path: Path) -> None:
    for text in ("print('hello')", "raise SystemExit(3)", "print('{}')", "1/0"):
        with pytest.raises(EvaluationError, match="no verdict"):
            verify(script(tmp_path, text), [])
    said = json.dumps({"valid": True, "reason": "", "value": float("inf"), "strict": 1.0})
    with pytest.raises(EvaluationError, match="inf"):
        verify(script(tmp_path, f"print({said!r})"), [])


def test_the_environment_stays_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVIDER_KEY", "secret")
    text = "import json, os; print(json.dumps(dict(valid=True, reason=str(dict(os.environ)), value=0, strict=0)))"
    assert "secret" not in verify(script(tmp_path, text), []).reason
