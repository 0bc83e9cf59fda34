"""Runs inside the checker's sandbox: the unit tests of one folder against the work folder. Standalone script, started by path.

    unit_tests.py TESTS WORK        a word on stdin marks the line with the result

Tests and the code under test share this process, so the word keeps honest code from being misread, not hostile code from lying.
"""

import io
import json
import sys
import unittest
from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    tests, work = argv
    word = sys.stdin.readline().strip()
    sys.path.insert(0, work)
    said = io.StringIO()
    found = unittest.defaultTestLoader.discover(tests, top_level_dir=tests)
    result = unittest.TextTestRunner(stream=said, verbosity=0).run(found)
    wrong = [str(test).split()[0] for test, _ in (*result.failures, *result.errors)]
    line = {"run": result.testsRun, "wrong": wrong, "skipped": len(result.skipped)}
    sys.stdout.write(f"\n{word} {json.dumps(line)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
