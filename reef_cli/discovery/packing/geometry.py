"""Local improvement of packings: best radii for fixed centres, polishing of centres and radii together. Needs SciPy.

`polish` is sequential linear programming. The distance of two points is convex, so its linearisation is never larger: a step
that keeps the linearised constraints keeps the real ones, every iterate is a packing and the sum never falls. It ends exactly
at the optimum; `interior.settle` comes to 1e-10 of one sooner. `slsqp` is SciPy's sequential quadratic programming with
analytic Jacobians, which is slower than both.
"""

import functools
from dataclasses import dataclass
from typing import Any

from reef_cli.core.errors import MissingDependency

MOST_STEPS = 60
STOP_BELOW = 1e-12
"""Polishing ends when a step gains less."""

REACH = 0.05
"""How far a centre may move in one step of polishing; pairs farther apart than that allows are left out."""

_LP = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10, "presolve": False}


@functools.cache
def scientific() -> tuple[Any, Any, Any]:
    """numpy, scipy.optimize, scipy.sparse. Raises `MissingDependency`."""
    try:
        import numpy
        import scipy.optimize
        import scipy.sparse
    except ImportError as error:
        raise MissingDependency(
            "the packing search needs SciPy", why=str(error), hint="pip install 'reef-cli[discover]'"
        ) from error
    return numpy, scipy.optimize, scipy.sparse


@dataclass(frozen=True, slots=True)
class Packing:
    """Centres `[n, 2]` and radii `[n]` as arrays."""

    centres: Any
    radii: Any

    @property
    def total(self) -> float:
        return float(self.radii.sum())

    def rows(self) -> list[list[float]]:
        """As `[x, y, r]` rows."""
        return [[float(x), float(y), float(r)] for (x, y), r in zip(self.centres, self.radii, strict=True)]


def packing(rows: Any) -> Packing:
    """From `[x, y, r]` rows."""
    np, _, _ = scientific()
    data = np.asarray(rows, dtype=float)
    return Packing(data[:, :2].copy(), data[:, 2].copy())


def best_radii(centres: Any) -> Packing:
    """The radii of largest sum around fixed centres: a linear programme, solved exactly up to rounding."""
    np, optimize, sparse = scientific()
    n = len(centres)
    first, second = np.triu_indices(n, 1)
    gaps = np.hypot(*(centres[first] - centres[second]).T)
    rows = np.arange(len(first))
    pairs = sparse.csr_matrix(
        (np.ones(2 * len(first)), (np.concatenate([rows, rows]), np.concatenate([first, second]))), shape=(len(first), n)
    )
    walls = np.minimum(centres, 1 - centres).min(1)
    found = optimize.linprog(-np.ones(n), pairs, gaps, bounds=np.stack([np.zeros(n), walls], 1), method="highs", options=_LP)
    if found.x is None:
        raise ValueError(f"no radii for these centres: {found.message}")
    return shrunk(Packing(centres, found.x))


def polish(centres: Any) -> Packing:
    """The packing that sequential linear programming reaches from `centres`."""
    np, _, _ = scientific()
    best = best_radii(np.clip(centres, 1e-3, 1 - 1e-3))
    for _ in range(MOST_STEPS):
        step = _linear_step(best)
        if step is None or step.total - best.total < STOP_BELOW:
            return step if step is not None and step.total > best.total else best
        best = step
    return best


def _linear_step(at: Packing) -> Packing | None:
    """The best packing within `REACH` of `at` under constraints linearised there; None when the programme fails."""
    np, optimize, sparse = scientific()
    n = len(at.radii)
    first, second = np.triu_indices(n, 1)
    apart = at.centres[first] - at.centres[second]
    gaps = np.hypot(*apart.T)
    # Two radii grow by at most 2 * REACH together in one step, as each centre moves by at most sqrt(2) * REACH.
    near = gaps < at.radii[first] + at.radii[second] + 5 * REACH
    first, second, gaps = first[near], second[near], gaps[near]
    unit = apart[near] / np.maximum(gaps, 1e-12)[:, None]
    pairs, m = np.arange(len(first)), len(first)
    ones, every = np.ones(m), np.arange(n)
    rows = [pairs] * 6
    columns = [first, second, n + first, n + second, 2 * n + first, 2 * n + second]
    values = [-unit[:, 0], unit[:, 0], -unit[:, 1], unit[:, 1], ones, ones]
    limits = [np.zeros(m)]
    for axis, sign, limit in ((0, -1.0, 0.0), (0, 1.0, 1.0), (n, -1.0, 0.0), (n, 1.0, 1.0)):
        rows += [m + every, m + every]
        columns += [axis + every, 2 * n + every]
        values += [np.full(n, sign), np.ones(n)]
        limits.append(np.full(n, limit))
        m += n
    matrix = sparse.csr_matrix((np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))), shape=(m, 3 * n))
    x, y = at.centres.T
    low = np.concatenate([x - REACH, y - REACH, np.zeros(n)])
    high = np.concatenate([x + REACH, y + REACH, np.full(n, 0.5)])
    cost = np.concatenate([np.zeros(2 * n), -np.ones(n)])
    found = optimize.linprog(
        cost, matrix, np.concatenate(limits), bounds=np.stack([low, high], 1), method="highs-ds", options=_LP
    )
    if found.x is None:
        return None
    return shrunk(Packing(np.stack([found.x[:n], found.x[n : 2 * n]], 1), found.x[2 * n :]))


def shrunk(found: Packing) -> Packing:
    """The same packing with the overlaps of rounding taken off: radii smaller by half the worst overlap, or by a wall's."""
    np, _, _ = scientific()
    first, second = np.triu_indices(len(found.radii), 1)
    pair = found.radii[first] + found.radii[second] - np.hypot(*(found.centres[first] - found.centres[second]).T)
    wall = found.radii - np.minimum(found.centres, 1 - found.centres).min(1)
    worst = max(float(pair.max(initial=0.0)) / 2, float(wall.max(initial=0.0)), 0.0)
    return Packing(found.centres, np.maximum(found.radii - worst, 0.0))


def slsqp(start: Packing, most_steps: int = 300, ftol: float = 1e-13) -> Packing:
    """The packing SciPy's SLSQP reaches from `start`, all pairs constrained, Jacobians analytic."""
    np, optimize, _ = scientific()
    n = len(start.radii)
    first, second = np.triu_indices(n, 1)
    pairs, every = np.arange(len(first)), np.arange(n)

    def constraints(v: Any) -> Any:
        x, y, r = v[:n], v[n : 2 * n], v[2 * n :]
        apart = np.hypot(x[first] - x[second], y[first] - y[second]) - r[first] - r[second]
        return np.concatenate([apart, x - r, 1 - x - r, y - r, 1 - y - r])

    walls = np.zeros((4 * n, 3 * n))
    for block, (axis, sign) in enumerate(((0, 1.0), (0, -1.0), (n, 1.0), (n, -1.0))):
        walls[block * n + every, axis + every] = sign
        walls[block * n + every, 2 * n + every] = -1.0

    def jacobian(v: Any) -> Any:
        x, y = v[:n], v[n : 2 * n]
        dx, dy = x[first] - x[second], y[first] - y[second]
        gap = np.maximum(np.hypot(dx, dy), 1e-12)
        found = np.zeros((len(first), 3 * n))
        for axis, part in ((0, dx / gap), (n, dy / gap)):
            found[pairs, axis + first] = part
            found[pairs, axis + second] = -part
        found[pairs, 2 * n + first] = found[pairs, 2 * n + second] = -1.0
        return np.concatenate([found, walls])

    cost = np.concatenate([np.zeros(2 * n), -np.ones(n)])
    result = optimize.minimize(
        lambda v: float(cost @ v),
        np.concatenate([*start.centres.T, start.radii]),
        jac=lambda _: cost,
        bounds=[(0.0, 1.0)] * (2 * n) + [(0.0, 0.5)] * n,
        constraints=[{"type": "ineq", "fun": constraints, "jac": jacobian}],
        method="SLSQP",
        options={"maxiter": most_steps, "ftol": ftol},
    )
    v = result.x
    return shrunk(Packing(np.stack([np.clip(v[:n], 0, 1), np.clip(v[n : 2 * n], 0, 1)], 1), np.maximum(v[2 * n :], 0)))
