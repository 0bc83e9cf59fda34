"""Circle packing as a discovery problem: statement, first solutions, verifier, search spaces."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reef_cli.core.errors import ConfigError
from reef_cli.discovery.packing import check
from reef_cli.discovery.packing.geometry import best_radii, scientific
from reef_cli.discovery.packing.lines import SAME_BELOW, WALK, LineSpace, even_rows
from reef_cli.discovery.packing.moves import Rows, lay_out
from reef_cli.discovery.problem import Made, Space
from reef_cli.discovery.programs import ProgramSpace, libraries

STATEMENT = """\
Choose {n} circles inside the unit square, none overlapping, so that the sum of their radii is as large as possible.

Circle i has its centre at (x_i, y_i) and the radius r_i >= 0, for i = 1..{n}.
Inside:   r_i <= x_i <= 1 - r_i  and  r_i <= y_i <= 1 - r_i.
Apart:    sqrt((x_i - x_j)^2 + (y_i - y_j)^2) >= r_i + r_j  for all i < j.
Maximise  r_1 + r_2 + ... + r_{n}.

A solution is a list of {n} rows [x, y, r]. The verifier recomputes the sum from the radii and allows an overlap of at most
{tolerance:g}; it also states the strict sum, of radii shrunk until the exact numbers overlap nowhere.
"""

FORM = """\
The program prints, as its last line, the packing as JSON: a list of {n} rows [x, y, r]. It may use numpy and scipy."""


class PackingProblem:
    """The packing of `n` circles. `tolerance` is the overlap the verifier lets pass as rounding."""

    def __init__(self, n: int = 26, tolerance: float = check.TOLERANCE) -> None:
        if not 1 <= n <= 200:
            raise ConfigError(f"the packing of {n} circles cannot be searched", hint="n lies between 1 and 200")
        if not 0 <= tolerance <= 1e-3:
            raise ConfigError(f"a tolerance of {tolerance} is no tolerance for rounding", hint="0 to 0.001")
        self.n, self.tolerance = n, tolerance
        self.name = f"packing-{n}"
        self.statement = STATEMENT.format(n=n, tolerance=tolerance)

    @property
    def verifier(self) -> Sequence[str | Path]:
        return (Path(check.__file__).resolve(), str(self.n), repr(self.tolerance))

    def starts(self, count: int, seed: int) -> Sequence[Made]:
        """Plain rows, each with the best radii for its centres; never polished."""
        np, _, _ = scientific()
        generator = np.random.default_rng(seed)
        layouts = even_rows(self.n)
        out = []
        for i in range(count):
            counts = layouts[i % len(layouts)]
            centres = lay_out(Rows(counts), self.n, 0.0 if i < len(layouts) else 0.01, generator)
            out.append(Made(best_radii(centres).rows(), "ROWS " + " ".join(map(str, counts))))
        return out

    def space(self, name: str) -> Space:
        if name == "lines":
            return LineSpace(self.n)
        if name == "walks":
            return LineSpace(self.n, walk=WALK)
        if name == "programs":
            return ProgramSpace(self.statement, libraries("numpy", "scipy"), FORM.format(n=self.n))
        raise ConfigError(f"packing has no search space {name!r}", hint="lines, walks or programs")

    def same(self, left: float, right: float) -> bool:
        return abs(left - right) < SAME_BELOW

    def draw(self, solution: Any) -> str:
        circles = "".join(f'<circle cx="{x:.6f}" cy="{1 - y:.6f}" r="{r:.6f}"/>' for x, y, r in solution)
        return (
            '<svg xmlns="http://www.w3.org/2000/svg" viewBox="-0.01 -0.01 1.02 1.02" width="420" height="420"'
            ' fill="none" stroke="currentColor" stroke-width="0.003"><rect width="1" height="1"/>'
            f'<g fill="#4a8fbd" fill-opacity="0.35">{circles}</g></svg>'
        )
