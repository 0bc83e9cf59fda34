"""The check at the end of every run finds what a test left behind, and nothing else."""

import os
import subprocess
import sys

from tests.conftest import MARK, marked_processes
from tests.e2e.server import until

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


def test_a_process_of_reef_that_carries_the_mark_is_found_until_it_ends() -> None:
    marked = os.environ | {MARK: "another-run"}
    left = subprocess.Popen([*SLEEP, "reef_cli.engines"], env=marked)
    others = [subprocess.Popen([*SLEEP, "reef_cli.engines"]), subprocess.Popen([*SLEEP, "something"], env=marked)]
    try:
        until(lambda: set(marked_processes("another-run")) == {left.pid}, "the process being found", 20)
    finally:
        for process in (left, *others):
            process.kill()
            process.wait()
    assert not marked_processes("another-run")
