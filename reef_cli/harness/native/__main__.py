"""`-p PROMPT` answers once and exits (1 on failure); without it, lines are read from a terminal or a pipe."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .chat import ChatError
from .loop import Session, from_environment


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="reef-native", description="Reef's own coding agent")
    parser.add_argument("-p", "--prompt", help="answer this and exit")
    parser.add_argument("--version", action="version", version="1.0.0")
    args = parser.parse_args(argv)
    try:
        session = from_environment()
    except KeyError as error:
        sys.stderr.write(f"reef-native: {error.args[0]} is not set; start it through its wrapper\n")
        return 2
    if args.prompt is not None:
        return _once(session, args.prompt)
    status = 0
    while True:
        if sys.stdin.isatty():
            sys.stderr.write("> ")
            sys.stderr.flush()
        line = sys.stdin.readline()
        if not line:
            return status
        if line.strip():
            status = _once(session, line.strip())


def _once(session: Session, prompt: str) -> int:
    try:
        print(session.ask(prompt), flush=True)
    except ChatError as error:
        sys.stderr.write(f"reef-native: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
