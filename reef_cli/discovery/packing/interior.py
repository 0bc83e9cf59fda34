"""Local improvement of packings by an interior-point method: several times faster than `geometry.polish`, to the same optima.

All constraints are slacks kept positive: pairs `d_ij - r_i - r_j`, walls, radii. A distance is convex in the centres, so a step
that keeps the linearised slacks positive keeps the real ones: every iterate is a packing without a line search. The curvature
of the distances is left out (a vertex of the constraints needs none, and the rest would be indefinite), so each Newton system
is positive definite, three unknowns a circle. Arrays over pairs are `[n, n]` and symmetric, diagonals 0.

What comes back touches nothing: its sum lies below the optimum's by about the number of slacks times `STOP_BELOW`. `polish`
takes it the rest of the way. Needs NumPy.
"""

from dataclasses import dataclass
from typing import Any

from reef_cli.discovery.packing.geometry import REACH, Packing, scientific

STOP_BELOW = 1e-12
"""Ends when slack times multiplier falls below this in the mean."""

MOST_STEPS = 60
FIRST_MULTIPLIERS = 1e-3
"""Slack times multiplier at the start: small, so that the search ends near where it began."""

SHRINK = 0.1
"""What a step aims to make of slack times multiplier."""

KEPT = 0.98
"""How much of the way to the nearest constraint a step may go."""

_RIDGE = 1e-9
"""Holds circles that nothing touches."""


@dataclass(slots=True)
class _Point:
    """Centres and radii with the multipliers of pairs `[n, n]` and of walls and signs `[5, n]`."""

    x: Any
    y: Any
    r: Any
    pairs: Any
    edges: Any


@dataclass(frozen=True, slots=True)
class _Slacks:
    """What is left at a point: of pairs (1 on the diagonal, where there is none) and of edges, and the directions of pairs."""

    pairs: Any
    edges: Any
    along_x: Any
    along_y: Any


def settle(centres: Any) -> Packing:
    """The packing that the method reaches from `centres` `[n, 2]`; strictly inside all constraints."""
    at = _start(centres)
    count = len(at.r) * (len(at.r) - 1) / 2 + at.edges.size
    for _ in range(MOST_STEPS):
        left = _slacks(at)
        product = float((at.pairs * left.pairs).sum() / 2 + (at.edges * left.edges).sum()) / count
        if product < STOP_BELOW or not _move(at, left, SHRINK * product):
            break
    np, _, _ = scientific()
    return Packing(np.stack([at.x, at.y], 1), at.r)


def _start(centres: Any) -> _Point:
    """Each circle nine tenths of what its walls and its nearest neighbour leave it."""
    np, _, _ = scientific()
    inside = np.clip(centres, 1e-3, 1 - 1e-3)
    nearest = _nearest(inside)
    if nearest.min() < 1e-5:  # centres in one place have no direction apart
        every = np.arange(len(inside))
        out = 0.4 * np.sqrt((every + 0.5) / len(inside))
        inside = 0.95 * inside + 0.05 * (0.5 + np.stack([out * np.cos(2.4 * every), out * np.sin(2.4 * every)], 1))
        nearest = _nearest(inside)
    r = 0.9 * np.minimum(nearest / 2, np.minimum(inside, 1 - inside).min(1))
    x, y = inside[:, 0].copy(), inside[:, 1].copy()
    at = _Point(x, y, r, None, None)
    left = _slacks(at)
    at.pairs, at.edges = FIRST_MULTIPLIERS / left.pairs, FIRST_MULTIPLIERS / left.edges
    np.fill_diagonal(at.pairs, 0.0)
    return at


def _nearest(centres: Any) -> Any:
    """The distance from each centre to the next."""
    np, _, _ = scientific()
    apart = centres[:, None] - centres
    gaps = np.hypot(apart[..., 0], apart[..., 1])
    np.fill_diagonal(gaps, np.inf)
    return gaps.min(1)


def _slacks(at: _Point) -> _Slacks:
    np, _, _ = scientific()
    dx, dy = at.x[:, None] - at.x, at.y[:, None] - at.y
    gaps = np.sqrt(dx * dx + dy * dy)
    np.fill_diagonal(gaps, 1.0)
    pairs = gaps - at.r[:, None] - at.r
    np.fill_diagonal(pairs, 1.0)
    edges = np.stack([at.x - at.r, 1 - at.x - at.r, at.y - at.r, 1 - at.y - at.r, at.r])
    return _Slacks(pairs, edges, dx / gaps, dy / gaps)


def _move(at: _Point, left: _Slacks, target: float) -> bool:
    """One Newton step towards slacks whose product with their multipliers is `target`, cut so that all stay positive.

    False, and `at` as it was, where rounding leaves the system without a solution.
    """
    np, _, _ = scientific()
    n, u, v = len(at.r), left.along_x, left.along_y
    per_pair, per_edge = at.pairs / left.pairs, at.edges / left.edges
    pull, push = target / left.pairs, target / left.edges
    np.fill_diagonal(pull, 0.0)
    slope = np.concatenate([
        (pull * u).sum(1) + push[0] - push[1],
        (pull * v).sum(1) + push[2] - push[3],
        1.0 - pull.sum(1) + push[4] - push[:4].sum(0),
    ])  # fmt: skip
    try:
        step = np.linalg.solve(_system(per_pair, per_edge, u, v), slope)
    except np.linalg.LinAlgError:
        return False
    dx, dy, dr = step[:n], step[n : 2 * n], step[2 * n :]
    grown = u * (dx[:, None] - dx) + v * (dy[:, None] - dy) - dr[:, None] - dr
    np.fill_diagonal(grown, 0.0)
    freed = np.stack([dx - dr, -dx - dr, dy - dr, -dy - dr, dr])
    pairs, edges = pull - at.pairs - per_pair * grown, push - at.edges - per_edge * freed
    far = min(_share(grown / left.pairs, freed / left.edges), REACH / max(float(abs(step[: 2 * n]).max()), REACH))
    at.x, at.y, at.r = at.x + far * dx, at.y + far * dy, at.r + far * dr
    far = _share(pairs / np.where(at.pairs > 0, at.pairs, 1.0), edges / at.edges)
    at.pairs, at.edges = at.pairs + far * pairs, at.edges + far * edges
    return True


def _share(*changes: Any) -> float:
    """How much of a step may be taken when these are the changes relative to what must stay positive."""
    worst = max(float(-change.min()) for change in changes)
    return min(1.0, KEPT / worst) if worst > 0 else 1.0


def _system(per_pair: Any, per_edge: Any, u: Any, v: Any) -> Any:
    """The Newton matrix `[3n, 3n]`: what each constraint's gradient adds, weighted by multiplier over slack."""
    np, _, _ = scientific()
    n = len(per_pair)
    left, right, down, up = per_edge[:4]
    pair_u, pair_v = per_pair * u, per_pair * v
    # Per block the sign of the entries off the diagonal, the pairs' part, and what the edges add on the diagonal.
    blocks = (
        (0, 0, -1.0, pair_u * u, left + right + _RIDGE),
        (0, 1, -1.0, pair_u * v, 0.0),
        (1, 1, -1.0, pair_v * v, down + up + _RIDGE),
        (0, 2, -1.0, pair_u, right - left),
        (1, 2, -1.0, pair_v, up - down),
        (2, 2, 1.0, per_pair, per_edge.sum(0) + _RIDGE),
    )
    matrix = np.empty((3 * n, 3 * n))
    for row, column, sign, part, edges in blocks:
        block = sign * part
        # A diagonal entry sums its row; only between centres has it the other sign.
        np.fill_diagonal(block, (-part if row < 2 == column else part).sum(1) + edges)
        matrix[row * n : row * n + n, column * n : column * n + n] = block
        matrix[column * n : column * n + n, row * n : row * n + n] = block.T
    return matrix
