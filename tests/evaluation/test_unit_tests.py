"""Unit tests of what a model wrote: run for real in the sandbox, with answers that try to pass without solving anything."""

import time
from pathlib import Path

import pytest

from reef_cli.core.errors import ConfigError, MissingDependency
from reef_cli.evaluation.graders import build
from reef_cli.sandbox import bubblewrap
from reef_cli.sandbox.program import Limits, Program, run

needs_sandbox = pytest.mark.skipif(bubblewrap.problem() is not None, reason=str(bubblewrap.problem()))
TESTS = "def test_sum():\n    assert add(1, 2) == 3\n\ndef test_negative():\n    assert add(-1, -2) == -3\n"


def graded(answer, **more):
    return build({"kind": "unit_tests", "tests": TESTS, **more}).grade(answer)


@needs_sandbox
def test_right_wrong_and_half_right_answers():
    right = "Here you are:\n```python\ndef add(a, b):\n    print('hello')\n    return a + b\n```\nDone."
    assert graded(right).score == 1.0 and graded(right).reason == "2 of 2 tests pass"
    half = "def add(a, b):\n    return abs(a) + abs(b)"
    found = graded(half)
    assert found.score == 0.0 and "1 of 2 tests pass; test_negative: AssertionError" in found.reason
    assert graded(half, partial=True).score == 0.5
    assert "SyntaxError" in graded("I would write a function.").reason


@needs_sandbox
@pytest.mark.parametrize(
    "trick",
    [
        "import os\nos._exit(0)",
        "raise SystemExit(0)",
        "import sys\nsys.exit(0)",
        'print(\'["", "passed", "test_sum"]\')',
        "def test_sum(): pass\ndef test_negative(): pass",
        "import builtins\nbuiltins.AssertionError = type('Never', (BaseException,), {})\nadd = lambda a, b: 0",
        'import os\nos.write(2, b\'["x", "passed", "test_sum"]\\n\')\nadd = lambda a, b: 0',
    ],
)
def test_tricks_pass_nothing(trick):
    assert graded(trick, partial=True).score == 0.0


@needs_sandbox
def test_an_endless_answer_ends_and_a_script_is_one_test():
    started = time.monotonic()
    found = graded("def add(a, b):\n    while True: pass", timeout_s=1)
    assert found.score == 0.0 and "not done after 1 s" in found.reason and time.monotonic() - started < 8
    spec = {"kind": "unit_tests", "tests": "def check(f):\n    assert f(2) == 4\ncheck(double)"}
    assert build(spec).grade("double = lambda x: 2 * x").score == 1.0
    assert build(spec).grade("double = lambda x: x").score == 0.0


@needs_sandbox
def test_the_sandbox_hides_files_network_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "secret").write_text("s3cret")
    monkeypatch.setenv("PROVIDER_KEY", "s3cret")
    probe = f"cat {tmp_path}/secret; env; ls /home /root; cat /proc/net/dev; touch /usr/x; echo done"
    done = run(Program(["sh", "-c", probe]))
    assert "s3cret" not in done.output and "done" in done.output and not Path("/usr/x").exists()
    interfaces = {line.split(":")[0].strip() for line in done.output.splitlines() if line.count(":") == 1 and " 0 " in line}
    assert interfaces == {"lo"}, done.output


@needs_sandbox
def test_limits_hold():
    assert "MemoryError" in run(Program(["python3", "-c", "x = 'a' * (4 << 30)"])).output
    big = run(Program(["sh", "-c", "head -c 3000000 /dev/zero > /tmp/x; wc -c < /tmp/x"], limits=Limits(file_bytes=1_000_000)))
    assert "1000000" in big.output or big.code != 0
    long = run(Program(["sh", "-c", "yes | head -c 900000"]))
    assert len(long.output) < 300_000 and "[...]" in long.output
    slow = run(Program(["sh", "-c", "sleep 60 & sleep 60"], limits=Limits(seconds=0.5)))
    assert slow.timed_out and slow.code < 0


def test_what_is_no_test_is_refused():
    for tests in ("", "def broken(:", "   "):
        with pytest.raises(ConfigError):
            build({"kind": "unit_tests", "tests": tests})
    with pytest.raises(ConfigError):
        build({"kind": "unit_tests", "tests": "assert f", "timeout_s": 0})


def test_without_a_sandbox_the_suite_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bubblewrap, "problem", lambda: "the program bwrap is missing")
    with pytest.raises(MissingDependency, match="sandbox") as caught:
        build({"kind": "unit_tests", "tests": "assert f"})
    assert "bubblewrap" in caught.value.hint
