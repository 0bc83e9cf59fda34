"""Cores a process may use."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from reef_cli.core.machine import usable_cores

ASK = "from reef_cli.core.machine import usable_cores; print(usable_cores())"


def test_affinity_counts_not_the_machine() -> None:
    one = str(min(os.sched_getaffinity(0)))
    asked = subprocess.run(["taskset", "-c", one, sys.executable, "-c", ASK], capture_output=True, text=True, check=True)
    assert asked.stdout.strip() == "1"


@pytest.mark.parametrize(
    ("quota", "cores"), [("100000 100000", 1), ("150000 100000", 2), ("1000 100000", 1), ("max 100000", None), ("", None)]
)
def test_a_containers_quota_counts(tmp_path: Path, quota: str, cores: int | None) -> None:
    (tmp_path / "cpu.max").write_text(quota + "\n")
    mine = len(os.sched_getaffinity(0))
    assert usable_cores(tmp_path / "cpu.max") == (mine if cores is None else min(cores, mine))


def test_no_quota_file(tmp_path: Path) -> None:
    assert usable_cores(tmp_path / "cpu.max") == len(os.sched_getaffinity(0))
