"""The verifier of circle packings: raw numbers in, verdict out. Standard library only; also a program of its own.

Nothing a solution says about itself counts: the sum is recomputed from the radii. Under a tolerance walls and pairs may overlap
by that much, so sums compare only under the same tolerance. Beside it stands the strict sum: radii shrunk until the exact
rational numbers behind the floats overlap nowhere, checked without rounding and without a square root.

    python -I check.py N TOLERANCE < solution.json
"""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

TOLERANCE = 1e-12
"""Default allowance for touching circles: an exact optimum touches, and rounding alone would refuse it at 0."""

SMALLEST_SHRINK = 1e-15
"""First shrink that is tried when the numbers as given overlap by rounding."""


@dataclass(frozen=True, slots=True)
class Check:
    """What the verifier found. `total` is the sum under the tolerance, `strict_total` the sum without any overlap.

    `radii` are those of the strict sum; `slack` is the smallest distance to a wall or a neighbour of the numbers as given.
    """

    valid: bool
    reason: str
    total: float = 0.0
    strict_total: float = 0.0
    slack: float | None = None
    exact: bool = False
    shrink: float = 0.0
    radii: tuple[float, ...] = ()


Circle = tuple[float, float, float]


def check(solution: Any, n: int, tolerance: float = TOLERANCE) -> Check:
    """Judge `solution`: a list of n rows `[x, y, r]`."""
    circles = _circles(solution, n)
    if isinstance(circles, str):
        return Check(False, circles)
    slack, where = smallest_slack(circles)
    if slack < -tolerance:
        return Check(False, f"{where} overlap by {-slack:.3g}", slack=slack)
    shrink, radii = strict_radii(circles)
    total = math.fsum(r for _, _, r in circles)
    strict = math.fsum(radii)
    return Check(True, "valid", total, strict, slack, shrink == 0.0, shrink, radii)


def _circles(solution: Any, n: int) -> list[Circle] | str:
    """The rows as finite numbers, or why they are none."""
    if not isinstance(solution, Sequence) or isinstance(solution, str | bytes) or len(solution) != n:
        return f"needs a list of {n} circles"
    rows: list[Circle] = []
    for index, row in enumerate(solution):
        if not isinstance(row, Sequence) or isinstance(row, str | bytes) or len(row) != 3:
            return f"circle {index} is not [x, y, r]"
        values = [_number(value) for value in row]
        if any(value is None for value in values):
            return f"circle {index} has something that is no finite number"
        x, y, r = (value for value in values if value is not None)
        if r < 0:
            return f"circle {index} has a negative radius"
        if not (0 <= x <= 1 and 0 <= y <= 1):
            return f"the centre of circle {index} lies outside the square"
        rows.append((x, y, r))
    return rows


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def smallest_slack(circles: Sequence[Circle]) -> tuple[float, str]:
    """The smallest distance between a circle and a wall or another circle, and between what it lies."""
    least, where = math.inf, ""
    for i, (x, y, r) in enumerate(circles):
        wall = min(x - r, 1 - x - r, y - r, 1 - y - r)
        if wall < least:
            least, where = wall, f"circle {i} and the square"
        for j in range(i):
            other = circles[j]
            gap = math.hypot(x - other[0], y - other[1]) - r - other[2]
            if gap < least:
                least, where = gap, f"circles {j} and {i}"
    return least, where


def overlaps(circles: Sequence[Circle]) -> bool:
    """Whether the exact rational circles leave the square or overlap; touching is allowed."""
    fractions = [Fraction(value) for circle in circles for value in circle]
    # Floats are fractions over powers of two: over the largest of these denominators all are whole numbers.
    one = max(value.denominator for value in fractions)
    whole = [value.numerator * (one // value.denominator) for value in fractions]
    exact = list(zip(whole[0::3], whole[1::3], whole[2::3], strict=True))
    for i, (x, y, r) in enumerate(exact):
        if r > x or r > y or x + r > one or y + r > one:
            return True
        for other_x, other_y, other_r in exact[:i]:
            if (x - other_x) ** 2 + (y - other_y) ** 2 < (r + other_r) ** 2:
                return True
    return False


def strict_radii(circles: Sequence[Circle]) -> tuple[float, tuple[float, ...]]:
    """The smallest shrink (doubled from 1e-15) after which the exact circles overlap nowhere, and the radii then."""
    shrink = 0.0
    while True:
        radii = tuple(max(0.0, r - shrink) for _, _, r in circles)
        if not overlaps([(x, y, r) for (x, y, _), r in zip(circles, radii, strict=True)]):
            return shrink, radii
        shrink = shrink * 2 or SMALLEST_SHRINK


def to_json(found: Check) -> Mapping[str, Any]:
    """The verdict as data of the verifier protocol."""
    return {
        "valid": found.valid,
        "reason": found.reason,
        "value": found.total,
        "strict": found.strict_total,
        "slack": found.slack,
        "exact": found.exact,
        "shrink": found.shrink,
        "radii": list(found.radii),
    }


def main() -> None:
    """Judge the solution on stdin; one JSON object on stdout."""
    try:
        solution = json.loads(sys.stdin.buffer.read())
    except (ValueError, RecursionError):
        found = Check(False, "is no JSON")
    else:
        found = check(solution, int(sys.argv[1]), float(sys.argv[2]))
    json.dump(to_json(found), sys.stdout)


if __name__ == "__main__":
    main()
