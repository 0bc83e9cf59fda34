"""Run the tests that need a real SGLang, in an environment made for them. `make test-sglang` calls it with Reef's interpreter.

Where the environment cannot be made the last lines say so and the exit is 0: the rest of the tests does not depend on it.
"""

import os
import subprocess
import sys
from pathlib import Path

import sglang_env

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 1800.0
"""The lane as a whole; a test that hangs ends sooner by its own limit."""


def main(arguments: list[str]) -> int:
    try:
        python = sglang_env.make()
    except sglang_env.CannotMake as reason:
        print(f"SGLang lane: not run, its environment cannot be made here: {reason}")
        return 0
    command = [sys.executable, "-m", "pytest", "tests/sglang", "--timeout", "600", *arguments]
    environment = os.environ | {"REEF_TEST_SGLANG": str(python), "OMP_NUM_THREADS": "1"}
    try:
        return subprocess.run(command, cwd=ROOT, env=environment, timeout=LIMIT_S, check=False).returncode
    except subprocess.TimeoutExpired:
        print(f"SGLang lane: not finished within {LIMIT_S:.0f} s")
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
