"""The page of error codes is what the error tree says."""

import subprocess
import sys
from pathlib import Path

from reef_cli.core import errors

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_current() -> None:
    done = subprocess.run([sys.executable, "scripts/error_codes.py", "--check"], cwd=ROOT, check=False)
    assert done.returncode == 0, "run: python scripts/error_codes.py"


def test_every_code_has_its_line() -> None:
    text = (ROOT / "docs" / "error-codes.md").read_text()
    for cls in errors.leaves():
        if cls.__module__ != errors.__name__:
            continue
        assert f"| `{cls.code}` | {cls.status} | {cls.exit_code} |" in text
        assert (cls.__doc__ or "").strip(), f"{cls.__name__} says when it happens"
