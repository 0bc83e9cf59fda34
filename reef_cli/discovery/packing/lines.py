"""The space of lines: a policy writes one line, a solver turns it into a packing. Small models can drive it.

An initial state is answered by a `ROWS` line (a new layout), a found one by a `SHAKE` line (a change of its circles). The first
word is given to the model as the start of its answer.
"""

from collections.abc import Callable, Sequence
from typing import Any

from reef_cli.discovery.packing.geometry import Packing, packing, polish, scientific
from reef_cli.discovery.packing.moves import ROW_NOISE, Rows, Shake, change, lay_out, parse
from reef_cli.discovery.problem import Ask, Made, State, Unusable

_ROWS_SHOWN = ("5 6 5 6 5", "4 5 4 5 4 5", "6 6 5 6 6", "5 5 5 5 5", "4 6 5 6 4", "6 7 6 7 6", "5 6 5 6 5 5")
_SHAKES_SHOWN = ("SHAKE 5", "SHAKE 2 MOVE 9", "SHAKE 0 SWAP 7 16", "SHAKE 8", "SHAKE 3 AREA 2")
MOST_SHOWN = 4


class LineSpace:
    """Lines for `n` circles. `improve` makes the packing of the centres a line leads to."""

    name = "lines"

    def __init__(self, n: int, improve: Callable[[Any], Packing] = polish) -> None:
        self._n, self._improve = n, improve

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
            centres = lay_out(move, self._n, ROW_NOISE, generator)
        elif isinstance(move, Shake) and not parent.initial:
            centres = change(move, packing(parent.solution), generator)
        else:
            raise Unusable("not_a_line")
        return Made(self._improve(centres).rows(), " ".join(line.split()))


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
