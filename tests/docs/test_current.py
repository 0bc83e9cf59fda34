"""Generated pages and sections are what the code says; a broken page is noticed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, prose

GENERATED = ("README.md", "docs/cli.md", "docs/configuration.md", "docs/http-api.md", "docs/operations.md", "docs/records.md")


def docs(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/docs.py", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_generated_pages_are_current() -> None:
    done = docs(ROOT, "--check")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_stale_pages_fail_the_check_and_are_written_anew(tmp_path: Path) -> None:
    for part in ("scripts", "docs", "reef_cli", "recipes", "benchmarks/results"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "README.md", tmp_path)
    assert docs(tmp_path).returncode == 0
    before = {name: (tmp_path / name).read_text(encoding="utf-8") for name in GENERATED}
    for name, text in before.items():
        (tmp_path / name).write_text(without_a_row(text), encoding="utf-8")
    done = docs(tmp_path, "--check")
    assert done.returncode == 1 and all(name in done.stderr for name in GENERATED)
    assert docs(tmp_path).returncode == 0
    assert before == {name: (tmp_path / name).read_text(encoding="utf-8") for name in GENERATED}


def without_a_row(text: str) -> str:
    """The page without the last row of its (first) generated table."""
    row = next(line for line in reversed(text.partition("<!-- end ")[0].splitlines()) if line.startswith("| "))
    return text.replace(row + "\n", "")


def test_the_readme_claims_no_figure_outside_its_generated_table() -> None:
    text = prose(ROOT / "README.md")
    begin, end = text.index("<!-- begin numbers -->"), text.index("<!-- end numbers -->")
    section = text[text.index("## Numbers") : begin] + text[end : text.index("## What it does not do")]
    assert not any(character.isdigit() for character in section)
