"""The space of programs: a policy writes a Python program, the sandbox runs it, its last line of output is the solution.

A program sees the interpreter and the libraries it is given, no network, no files and no server. What it prints is data for the
verifier; the rest of its output, cut short, is told to whoever improves it.
"""

import importlib.util
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from reef_cli.core.errors import MissingDependency
from reef_cli.discovery.problem import Ask, Made, State, Unusable
from reef_cli.sandbox.program import Finished, Limits, Program, run

LIBRARIES = "/reef/libraries"
TAIL_CHARACTERS = 600
LONGEST_PROGRAM = 100_000
_FENCE = re.compile(r"```[ \t]*(?:python|py|python3)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
_ENVIRONMENT = {"PYTHONPATH": LIBRARIES, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


class ProgramSpace:
    """Programs for the problem `statement`; `form` says how a program hands over its solution."""

    name = "programs"

    def __init__(
        self, statement: str, readable: Mapping[str, Path], form: str, limits: Limits | None = None, max_tokens: int = 8192
    ) -> None:
        self._statement, self._readable, self._form = statement, readable, form
        self._limits = limits or Limits(seconds=120.0, memory_bytes=4 * 1024**3)
        self._max_tokens = max_tokens

    def ask(self, parent: State) -> Ask:
        parts = [
            self._statement,
            self._form,
            f"It is stopped after {self._limits.seconds:g} seconds on one processor. Seed every random number from the variable"
            " SEED, which is set before the program starts.",
        ]
        if parent.initial:
            parts.append(f"A plain solution reaches {parent.value:.10g}. Write a program that finds a better one.")
        else:
            parts.append(f"This program reaches {parent.value:.10g}:\n```python\n{parent.text}\n```")
            if parent.summary:
                parts.append(f"The end of its output:\n{parent.summary}")
            parts.append("Write a program that reaches more.")
        parts.append("Answer with the whole program in one ```python block.")
        return Ask("\n\n".join(parts), chat=True, max_tokens=self._max_tokens)

    def make(self, parent: State, text: str, seed: int) -> Made:  # noqa: ARG002 - a program stands alone
        code = program_of(text)
        argv = [str(Path(sys.executable).resolve()), "-c", _START]
        stdin = json.dumps({"seed": seed % 2**32, "code": code}).encode()
        done = run(Program(argv, readable=self._readable, environment=_ENVIRONMENT, stdin=stdin, limits=self._limits))
        return Made(_solution(done), code, _tail(done.output))


_START = """
import json, sys
given = json.loads(sys.stdin.read())
exec(compile(given["code"], "program.py", "exec"), {"__name__": "__main__", "SEED": given["seed"]})
"""


def program_of(text: str) -> str:
    """The last fenced block. Raises `Unusable` without one."""
    blocks: list[str] = _FENCE.findall(text)
    if not blocks or not blocks[-1].strip():
        raise Unusable("no_program")
    if len(blocks[-1]) > LONGEST_PROGRAM:
        raise Unusable("program_too_long")
    return blocks[-1].strip()


def _solution(done: Finished) -> object:
    if done.timed_out:
        raise Unusable("program_too_slow")
    if done.code != 0:
        raise Unusable("program_failed")
    lines = done.output.strip().splitlines()
    try:
        return json.loads(lines[-1]) if lines else None
    except (ValueError, RecursionError) as error:
        raise Unusable("output_is_no_solution") from error


def _tail(output: str) -> str:
    """The end of what was printed before the solution."""
    return "\n".join(output.strip().splitlines()[:-1])[-TAIL_CHARACTERS:]


def libraries(*names: str) -> dict[str, Path]:
    """Folders of installed packages, and their bundled shared libraries, as a sandbox mounts them."""
    found: dict[str, Path] = {}
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            raise MissingDependency(f"programs need {name}", hint="pip install 'reef-cli[discover]'")
        folder = Path(next(iter(spec.submodule_search_locations)))
        for part in (folder, folder.with_name(f"{name}.libs")):
            if part.is_dir():
                found[f"{LIBRARIES}/{part.name}"] = part
    return found
