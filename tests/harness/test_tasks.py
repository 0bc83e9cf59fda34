"""Coding tasks: loaded from folders, graded by unit tests in a sandbox; the shipped ones are solvable and unsolved."""

import re
import shutil
from pathlib import Path

import pytest

from reef_cli.core.errors import ConfigError
from reef_cli.harness import files, sandbox
from reef_cli.harness.tasks import CodingTask, load_tasks, run_tests
from reef_cli.sandbox.program import Limits

needs_sandbox = pytest.mark.skipif(sandbox.problem() is not None, reason=str(sandbox.problem()))
SHIPPED = Path(__file__).resolve().parents[2] / "recipes/harness_evolve/examples/harness_evolve/tasks"
SOLUTIONS = {
    "slugs": (
        "slugs.py",
        "import re, unicodedata\ndef slugify(title):\n"
        "    plain = unicodedata.normalize('NFKD', title).encode('ascii', 'ignore').decode().lower()\n"
        "    return re.sub(r'[^a-z0-9]+', '-', plain).strip('-') or 'untitled'\n",
    ),
    "ledger": (
        "ledger.py",
        "from decimal import Decimal, InvalidOperation\nfrom collections import defaultdict\ndef report(lines):\n"
        "    sums = defaultdict(Decimal)\n    for n, line in enumerate(lines, 1):\n"
        "        if not line.strip() or line.startswith('#'): continue\n        try:\n"
        "            _, name, amount = line.split(); sums[name] += Decimal(amount)\n"
        "        except (ValueError, InvalidOperation): raise ValueError(f'line {n}')\n"
        "    rows = sorted(sums.items(), key=lambda row: (-abs(row[1]), row[0]))\n"
        "    return '\\n'.join(f'{name}: {value:.2f}' for name, value in rows)\n",
    ),
    "intervals": (
        "calendar_gaps.py",
        "def free(meetings, day):\n    gaps, cursor = [], day[0]\n    for start, end in sorted(meetings):\n"
        "        if min(start, day[1]) > cursor: gaps.append((cursor, min(start, day[1])))\n        cursor = max(cursor, end)\n"
        "    if cursor < day[1]: gaps.append((cursor, day[1]))\n    return gaps\n",
    ),
}


def tasks() -> list[CodingTask]:
    return load_tasks(SHIPPED)


@needs_sandbox
@pytest.mark.parametrize("name", SOLUTIONS)
def test_a_shipped_task_is_unsolved_at_the_start_and_can_be_solved(name: str, tmp_path: Path) -> None:
    task = next(task for task in tasks() if task.task.id == name)
    assert not any(path.startswith("test") for path in task.task.files)
    files.write(task.task.files, tmp_path / "work")
    score, reason = run_tests(task.tests, tmp_path / "work")
    assert score < 1.0, reason
    file, text = SOLUTIONS[name]
    (tmp_path / "work" / file).write_text(text)
    score, reason = run_tests(task.tests, tmp_path / "work")
    assert score == 1.0 and re.fullmatch(r"(\d+) of \1 tests passed", reason), reason


@needs_sandbox
def test_bad_code_scores_zero_and_says_why(tmp_path: Path) -> None:
    folder, work = tmp_path / "tests", tmp_path / "work"
    folder.mkdir(), work.mkdir()
    (folder / "test_it.py").write_text(
        "import unittest, mine\nclass T(unittest.TestCase):\n def test_a(self): mine.f()\n def test_b(self): pass\n"
    )
    for text, score, why in (
        ("def f(): pass\n", 1.0, "2 of 2 tests passed"),
        ("def f(): 1/0\n", 0.5, "1 of 2 tests passed; not test_a"),
        ("def f(:\n", 0.0, "0 of 1 tests passed"),
        ("import os; os._exit(0)\n", 0.0, "ended with status 0"),
        ('print(\'0123456789abcdef {"run": 2, "wrong": [], "skipped": 0}\')\nimport os; os._exit(0)\n', 0.0, "ended"),
        ("import urllib.request\ndef f(): urllib.request.urlopen('http://192.0.2.1', timeout=2)\n", 0.5, "test_a"),
        ("def f(): open('/reef/tests/new', 'w')\n", 0.5, "test_a"),
        ("def f():\n while True: pass\n", 0.0, "in time"),
    ):
        (work / "mine.py").write_text(text)
        shutil.rmtree(work / "__pycache__", ignore_errors=True)
        found, reason = run_tests(folder, work, Limits(seconds=3.0 if "while True" in text else 60.0))
        assert (found, why in reason) == (score, True), (text, found, reason)


BAD = ("prompt = 3", "promt = 'x'", "", "prompt = 'x'\nextra = 1", "prompt = 'x'\nweight = 0", "prompt = 'x'\nsplit = 'mine'")


def test_malformed_tasks_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no folder"):
        load_tasks(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="no task"):
        load_tasks(tmp_path)
    one = tmp_path / "one"
    one.mkdir()
    (one / "task.toml").write_text("prompt = 'do it'")
    with pytest.raises(ConfigError, match="one has no tests"):
        load_tasks(tmp_path)
    (one / "tests").mkdir()
    (one / "tests" / "test_a.py").write_text("")
    first = load_tasks(tmp_path)[0].digest()
    (one / "tests" / "test_a.py").write_text("# changed")
    assert load_tasks(tmp_path)[0].digest() != first
    for text in BAD:
        (one / "task.toml").write_text(text)
        with pytest.raises(ConfigError, match="one is malformed"):
            load_tasks(tmp_path)
    (one / "task.toml").write_text("prompt = [")
    with pytest.raises(ConfigError, match="cannot read"):
        load_tasks(tmp_path)
