"""What a line does: `ROWS` lays circles out anew, `SHAKE` changes the packing it started from. Both end in polishing.

    ROWS 5 5 6 5 5              rows of circles from bottom to top
    ROWS 5 5 6 5 5 SHIFT 4      every second row moved by 4/20 of its spacing
    SHAKE 3                     every centre moved by normal noise of 0.03
    SHAKE 6 AREA 9              only near the middle of the ninth of the square (1 bottom left, 9 top right)
    SHAKE 0 MOVE 4 17           the 4th and 17th smallest circles taken out and put into gaps
    SHAKE 1 SWAP 2 20           the 2nd and the 20th smallest change places

Rows need not add up: missing circles go into the largest gaps, surplus ones are left out where it is tightest. Noise comes from
a seed beside the line, so that a line is a choice of how to search, not of one result.
"""

import re
from dataclasses import dataclass
from typing import Any

from reef_cli.discovery.packing.geometry import Packing, best_radii, scientific
from reef_cli.discovery.problem import Unusable

ROW_NOISE = 0.03
AREA_RADIUS = 0.3
MOST_MOVED = 3
COUNT_SLACK = 6
"""Rows may hold this many circles too few or too many."""

_GRID = 40
_ROWS = re.compile(r"ROWS((?: \d{1,2})+)(?: SHIFT (\d))?")
_SHAKE = re.compile(r"SHAKE (\d)(?: AREA ([1-9]))?(?: MOVE((?: \d{1,2})+))?(?: SWAP (\d{1,2}) (\d{1,2}))?")


@dataclass(frozen=True, slots=True)
class Rows:
    """A layout in rows."""

    counts: tuple[int, ...]
    shift: int = 0


@dataclass(frozen=True, slots=True)
class Shake:
    """A change of a packing. Ranks count from 1, smallest circle first."""

    strength: int
    area: int | None = None
    moved: tuple[int, ...] = ()
    swapped: tuple[int, int] | None = None


def parse(line: str, n: int) -> Rows | Shake:
    """The move a line writes. Raises `Unusable` with a stable reason."""
    text = " ".join(line.split())
    if rows := _ROWS.fullmatch(text):
        return _rows(Rows(tuple(map(int, rows[1].split())), int(rows[2] or 0)), n)
    if shake := _SHAKE.fullmatch(text):
        swapped = (int(shake[4]), int(shake[5])) if shake[4] else None
        moved = tuple(map(int, (shake[3] or "").split()))
        return _shake(Shake(int(shake[1]), int(shake[2]) if shake[2] else None, moved, swapped), n)
    raise Unusable("not_a_line")


def _rows(move: Rows, n: int) -> Rows:
    if not 1 <= len(move.counts) <= 12 or any(not 1 <= count <= 12 for count in move.counts):
        raise Unusable("rows_out_of_range")
    if abs(sum(move.counts) - n) > COUNT_SLACK:
        raise Unusable("rows_far_from_n")
    return move


def _shake(move: Shake, n: int) -> Shake:
    ranks = (*move.moved, *(move.swapped or ()))
    if any(not 1 <= rank <= n for rank in ranks) or len(set(ranks)) != len(ranks):
        raise Unusable("ranks_out_of_range")
    if len(move.moved) > MOST_MOVED:
        raise Unusable("too_many_moved")
    return move


def lay_out(move: Rows, n: int, noise: float, generator: Any) -> Any:
    """Centres of a layout in rows: `n` of them, with normal noise."""
    np, _, _ = scientific()
    height = len(move.counts)
    centres = [
        ((i + 0.5 + (move.shift / 20 if j % 2 else 0.0)) / count, (j + 0.5) / height)
        for j, count in enumerate(move.counts)
        for i in range(count)
    ]
    found = np.clip(np.array(centres), 0.02, 0.98)
    found = _inside(found + generator.normal(0.0, noise, found.shape))
    while len(found) > n:
        found = np.delete(found, int(best_radii(found).radii.argmin()), 0)
    while len(found) < n:
        spots, _ = gaps(best_radii(found))
        found = np.vstack([found, spots[0]])
    return found


def change(move: Shake, parent: Packing, generator: Any) -> Any:
    """Centres after a change of `parent`."""
    np, _, _ = scientific()
    centres, order = parent.centres.copy(), parent.radii.argsort(kind="stable")
    if move.swapped is not None:
        one, other = (order[rank - 1] for rank in move.swapped)
        centres[[one, other]] = centres[[other, one]]
    stirred = np.ones(len(centres), bool)
    if move.area is not None:
        middle = np.array([((move.area - 1) % 3 + 0.5) / 3, ((move.area - 1) // 3 + 0.5) / 3])
        stirred = np.hypot(*(centres - middle).T) < AREA_RADIUS
    centres[stirred] += generator.normal(0.0, move.strength / 100, (int(stirred.sum()), 2))
    if move.moved:
        centres = _relocate(Packing(_inside(centres), parent.radii), [int(order[rank - 1]) for rank in move.moved], generator)
    return _inside(centres)


def _relocate(at: Packing, taken: list[int], generator: Any) -> Any:
    """Put the circles `taken` into gaps between the others, none back where it was."""
    np, _, _ = scientific()
    left = np.delete(np.arange(len(at.radii)), taken)
    rest = Packing(at.centres[left], at.radii[left] * 0.9)
    for _ in taken:
        spots, room = gaps(rest)
        away = [i for i in range(len(spots)) if np.hypot(*(at.centres[taken] - spots[i]).T).min() > 0.05][:8]
        spot = away[int(generator.integers(len(away)))] if away else 0
        rest = Packing(np.vstack([rest.centres, spots[spot]]), np.append(rest.radii, max(0.0, float(room[spot]))))
    return rest.centres


def gaps(at: Packing) -> tuple[Any, Any]:
    """Places with locally the most room, widest first, and the room there; seen on a grid."""
    np, _, _ = scientific()
    axis = (np.arange(_GRID) + 0.5) / _GRID
    points = np.stack(np.meshgrid(axis, axis), -1).reshape(-1, 2)
    apart = points[:, None] - at.centres[None]
    room = np.minimum((np.hypot(apart[..., 0], apart[..., 1]) - at.radii).min(1), np.minimum(points, 1 - points).min(1))
    padded = np.pad(room.reshape(_GRID, _GRID), 1, constant_values=-np.inf)
    around = np.max(
        [padded[1 + a : _GRID + 1 + a, 1 + b : _GRID + 1 + b] for a in (-1, 0, 1) for b in (-1, 0, 1) if (a, b) != (0, 0)], 0
    )
    peaks = np.flatnonzero(room >= around.ravel())
    peaks = peaks[np.argsort(-room[peaks], kind="stable")]
    return points[peaks], room[peaks]


def _inside(centres: Any) -> Any:
    return centres.clip(0.01, 0.99)
