"""A small problem with a real verifier process, and a served model in memory."""

import atexit
import shutil
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from reef_cli.core.errors import ConfigError
from reef_cli.discovery.archive import Rollout
from reef_cli.discovery.desk import Proposal, Standing
from reef_cli.discovery.problem import Ask, Made, Space, State, Unusable

VERIFIER = """
import json, sys
value = json.loads(sys.stdin.read())
ok = isinstance(value, (int, float)) and 0 <= value <= 100
worth = value if ok else 0
print(json.dumps({"valid": ok, "reason": "valid" if ok else "out of range", "value": worth, "strict": worth}))
"""


class Numbers:
    """Find a large number: an answer adds to the parent's."""

    name = "numbers"
    statement = "Find a number up to 100."

    def __init__(self, folder: Path) -> None:
        self._script = folder / "verifier.py"
        self._script.write_text(VERIFIER)

    @property
    def verifier(self) -> Sequence[str | Path]:
        return (self._script,)

    def starts(self, count: int, seed: int) -> Sequence[Made]:
        return [Made(1.0 + i / 10, "start") for i in range(count)]

    def space(self, name: str) -> Space:
        if name != "add":
            raise ConfigError(f"no space {name}")
        return Adding()

    def same(self, left: float, right: float) -> bool:
        return abs(left - right) < 1e-9

    def draw(self, solution: Any) -> str:
        return f"<b>{solution}</b>"


class Adding:
    name = "add"

    def ask(self, parent: State) -> Ask:
        return Ask(f"{parent.value} plus", max_tokens=8)

    def make(self, parent: State, text: str, seed: int) -> Made:
        try:
            return Made(parent.value + float(text), text, f"added {text}")
        except ValueError:
            raise Unusable("no_number") from None


class Memory:
    """Answers from a function; trains at once, a release per complete grid."""

    def __init__(self, answer: Callable[[Ask, int], str], grid: int) -> None:
        self._answer, self._grid = answer, grid
        self._lock = threading.Lock()
        self.asked = 0
        self.reports: dict[tuple[int, int, int], tuple[float, bool]] = {}
        self.refuse: str | None = None
        self.releases = 0
        self.waited = 0
        self.twins: set[str | None] = set()

    def propose(self, ask: Ask, seed: int) -> Proposal:
        text = self._answer(ask, seed)
        with self._lock:
            self.asked += 1
            return Proposal(text, f"receipt-{self.asked}")

    def standing(self) -> Standing:
        return Standing(f"r{self.releases}", self.releases * self._grid, len(self.reports) % self._grid, False)

    def same_weights(self, left: str | None, right: str | None) -> bool:
        return left == right or {left, right} == self.twins

    def report(self, rollout: Rollout, run: str, *, learn: bool) -> str | None:
        self.reports[(rollout.step, rollout.group, rollout.rollout)] = (rollout.score, learn)
        if self.refuse is None and learn:
            self.releases = max(self.releases, len(self.reports) // self._grid)
        return self.refuse

    def await_trained(self, done_before: int, count: int, timeout_s: float, on_wait: Any = None) -> Standing:
        self.waited += 1
        now = self.standing()
        assert now.samples_done >= done_before + count, "the run waits only for grids that are complete"
        return now


class Letters(Numbers):
    """Any text at all adds something: what even a random model can be scored on."""

    name = "letters"
    statement = "Write much."

    def __init__(self) -> None:
        super().__init__(Path(tempfile.mkdtemp(prefix="reef-letters-")))
        atexit.register(shutil.rmtree, self._script.parent, True)

    def space(self, name: str) -> Space:
        return Writing()


class Writing(Adding):
    name = "write"

    def make(self, parent: State, text: str, seed: int) -> Made:
        return Made(parent.value + (len(set(text)) + seed % 997 / 1000) / 100, text)
