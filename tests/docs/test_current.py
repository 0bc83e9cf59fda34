"""Generated pages and sections are what the code says; a broken page is noticed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, prose


def docs(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/docs.py", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_generated_pages_are_current() -> None:
    done = docs(ROOT, "--check")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["README.md", "docs/cli.md", "docs/http-api.md", "docs/operations.md", "docs/records.md"])
def test_a_stale_page_fails_the_check_and_is_written_anew(name: str, tmp_path: Path) -> None:
    for part in ("scripts", "docs", "reef_cli", "recipes", "benchmarks/results"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "README.md", tmp_path)
    page = tmp_path / name
    before = page.read_text(encoding="utf-8")
    generated = before.partition("<!-- end ")[0]
    row = next(line for line in reversed(generated.splitlines()) if line.startswith("| "))
    page.write_text(before.replace(row + "\n", ""), encoding="utf-8")
    done = docs(tmp_path, "--check")
    assert done.returncode == 1 and name in done.stderr
    assert docs(tmp_path).returncode == 0
    assert page.read_text(encoding="utf-8") == before


def test_the_readme_claims_no_figure_outside_its_generated_table() -> None:
    text = prose(ROOT / "README.md")
    begin, end = text.index("<!-- begin numbers -->"), text.index("<!-- end numbers -->")
    section = text[text.index("## Numbers") : begin] + text[end : text.index("## What it does not do")]
    assert not any(character.isdigit() for character in section)
