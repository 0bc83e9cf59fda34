"""`reef`: hands the words of the command line to `commands.dispatch` and exits with its code."""

import sys

from reef_cli.commands.dispatch import run


def main() -> None:
    """Entry of the console script and of `python -m reef_cli`."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
