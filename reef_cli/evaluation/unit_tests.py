"""The grader `unit_tests`: Python that a model wrote, run against tests in a sandbox.

    {"kind": "unit_tests", "tests": "def test_sum():\n    assert add(1, 2) == 3", "timeout_s": 10, "partial": true}

The answer's last code fence (or, without one, the whole answer) is executed, then every top-level `test_*` function of `tests`;
without such functions `tests` is one script. Only the standard library is there. Which tests must report is read from `tests`
beforehand, each passed one is reported under a secret: an answer that ends the process early, prints, or defines tests of its
own passes nothing. Code that looks through its runner's frames for the secret could still forge a pass.
"""

import ast
import json
import re
import secrets
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from reef_cli.evaluation.grade import Grade
from reef_cli.sandbox import bubblewrap
from reef_cli.sandbox.program import Finished, Limits, Program, run

_FENCE = re.compile(r"```[ \t]*(?:python|py|python3)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
SCRIPT = "script"
# Runs inside. What the answer prints goes nowhere; passed tests are reported on the real stdout.
_RUNNER = """
import json, os, sys
task = json.loads(sys.stdin.read())
report = os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
def say(kind, text):
    os.write(report, (json.dumps([task["secret"], kind, text]) + chr(10)).encode())
def attempt(name, work):
    try:
        work()
    except BaseException as error:
        say("failed", f"{name}: {type(error).__name__}: {error}"[:300])
        return False
    return True
space = {"__name__": "answer"}
if attempt("answer", lambda: exec(compile(task["code"], "answer.py", "exec"), space)):
    loaded = attempt("tests", lambda: exec(compile(task["tests"], "tests.py", "exec"), space))
    for name in task["names"] if loaded else []:
        if name == "script" or attempt(name, lambda: space[name]()):
            say("passed", name)
os._exit(0)
"""


@dataclass(frozen=True, slots=True)
class UnitTests:
    """All tests must pass, or, with `partial`, the score is the share of those that do."""

    blocking: ClassVar[bool] = True
    tests: str
    timeout_s: float = 10.0
    partial: bool = False

    def __post_init__(self) -> None:
        test_names(self.tests)
        if not 0 < self.timeout_s <= 600:
            raise ValueError("`timeout_s` lies above 0 and at most 600")
        if (reason := bubblewrap.problem()) is not None:
            raise bubblewrap.missing("unit tests of answers", reason)

    def grade(self, answer: str) -> Grade:
        names = test_names(self.tests)
        secret = secrets.token_hex(16)
        task = {"secret": secret, "code": code_of(answer), "tests": self.tests, "names": names}
        argv = [str(Path(sys.executable).resolve()), "-I", "-c", _RUNNER]
        done = run(Program(argv, stdin=json.dumps(task).encode(), limits=Limits(seconds=self.timeout_s)))
        return self._read(done, secret, names)

    def _read(self, done: Finished, secret: str, names: list[str]) -> Grade:
        said = [line for line in map(_line, done.output.splitlines()) if line is not None and line[0] == secret]
        passed = {text for _, kind, text in said if kind == "passed"} & set(names)
        share = len(passed) / len(names)
        fault = next((text for _, kind, text in said if kind == "failed"), None)
        if done.timed_out:
            fault = f"not done after {self.timeout_s:g} s"
        elif fault is None and share < 1:
            fault = "the program ended before its tests"
        reason = f"{len(passed)} of {len(names)} tests pass" + (f"; {fault}" if fault else "")
        return Grade(share if self.partial else float(share == 1.0), reason)


def test_names(tests: str) -> list[str]:
    """The tests that must report. `ValueError` (also for a syntax error) when there are none."""
    functions = [node.name for node in ast.parse(tests).body if isinstance(node, ast.FunctionDef)]
    names = [name for name in functions if name.startswith("test")]
    if not tests.strip():
        raise ValueError("`tests` is empty")
    return names or [SCRIPT]


test_names.__test__ = False  # type: ignore[attr-defined]


def code_of(answer: str) -> str:
    """The last fenced block, else the whole answer."""
    blocks: list[str] = _FENCE.findall(answer)
    return blocks[-1] if blocks else answer


def _line(text: str) -> tuple[str, str, str] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return tuple(value) if isinstance(value, list) and len(value) == 3 else None
