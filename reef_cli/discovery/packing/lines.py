"""The space of lines: a policy writes one line, a solver turns it into a packing. Small models can drive it.

An initial state is answered by a `ROWS` line (a new layout), a found one by a `SHAKE` line (a change of its circles). The first
word is given to the model as the start of its answer. In the space of walks the solver follows the same line many times: the
best of several layouts, or a walk of changes in which each starts where the one before it ended. What comes back is polished.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from reef_cli.discovery.packing.geometry import Packing, packing, polish, scientific
from reef_cli.discovery.packing.interior import settle
from reef_cli.discovery.packing.moves import ROW_NOISE, Rows, Shake, change, lay_out, parse
from reef_cli.discovery.problem import Ask, Made, State, Unusable

_ROWS_SHOWN = ("5 6 5 6 5", "4 5 4 5 4 5", "6 6 5 6 6", "5 5 5 5 5", "4 6 5 6 4", "6 7 6 7 6", "5 6 5 6 5 5")
_SHAKES_SHOWN = ("SHAKE 5", "SHAKE 2 MOVE 9", "SHAKE 0 SWAP 7 16", "SHAKE 8", "SHAKE 3 AREA 2")
MOST_SHOWN = 4
WALK = 16
"""Times a line is followed in one try of the space of walks."""

WARMTH = 1e-3
"""A walk goes on from a packing that is worse by d with the probability exp(-d / WARMTH)."""

SAME_BELOW = 1e-7
"""Sums closer than this are the same packing for the search; local optima lie much farther apart."""


class LineSpace:
    """Lines for `n` circles. `improve` makes the packing of the centres a line leads to; `walk` is how often it is followed."""

    def __init__(self, n: int, improve: Callable[[Any], Packing] = settle, walk: int = 1) -> None:
        self._n, self._improve, self._walk = n, improve, walk
        self.name = "lines" if walk == 1 else "walks"

    def ask(self, parent: State) -> Ask:
        head = f"{self._n} circles in a square, sum of radii {parent.value:.4f}."
        if parent.initial:
            shown = "\n".join(f"ROWS {counts}" for counts in _shown_rows(self._n))
            return Ask(f"{head} Rows of circles:\n{shown}\nROWS", max_tokens=24, stop=("\n",))
        return Ask(f"{head} Changes:\n" + "\n".join(_SHAKES_SHOWN) + "\nSHAKE", max_tokens=16, stop=("\n",))

    def make(self, parent: State, text: str, seed: int) -> Made:
        first = "ROWS" if parent.initial else "SHAKE"
        line = f"{first} {text.strip().partition(chr(10))[0]}"
        move = parse(line, self._n)
        np, _, _ = scientific()
        generator = np.random.default_rng(seed)
        if isinstance(move, Rows) and parent.initial:
            found = [self._improve(lay_out(move, self._n, ROW_NOISE, generator)) for _ in range(self._walk)]
        elif isinstance(move, Shake) and not parent.initial:
            found = list(self._changes(move, packing(parent.solution), generator))
        else:
            raise Unusable("not_a_line")
        # A walk may come back to where it began; that is no discovery, and any other packing is worth more to the archive.
        best = max(found, key=lambda one: (abs(one.total - parent.value) > SAME_BELOW, one.total))
        return Made(polish(best.centres).rows(), " ".join(line.split()))

    def _changes(self, move: Shake, here: Packing, generator: Any) -> Iterator[Packing]:
        """The packings of a walk from `here`."""
        for _ in range(self._walk):
            new = self._improve(change(move, here, generator))
            yield new
            loss = here.total - new.total
            if loss <= 0 or generator.random() < math.exp(-loss / WARMTH):
                here = new


def _shown_rows(n: int) -> Sequence[str]:
    """Layouts to show, each within two circles of `n`."""
    fitting = [row for row in _ROWS_SHOWN if abs(sum(map(int, row.split())) - n) <= 2]
    return (fitting or [" ".join(map(str, counts)) for counts in even_rows(n)])[:MOST_SHOWN]


def even_rows(n: int) -> list[tuple[int, ...]]:
    """`n` circles in rows as equal as they can be, for the numbers of rows around the square root of `n`."""
    middle = round(n**0.5)
    out: list[tuple[int, ...]] = []
    for rows in sorted({middle, middle + 1, middle - 1}, key=lambda rows: abs(rows - middle)):
        if not 1 < rows <= n:
            continue
        least, more = divmod(n, rows)
        out.append(tuple(least + (i * more // rows != (i + 1) * more // rows) for i in range(rows)))
    return out or [(n,)]
