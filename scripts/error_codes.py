"""Write `docs/error-codes.md` from `reef_cli/core/errors.py`, so that the list cannot rot.

    python scripts/error_codes.py            # write it
    python scripts/error_codes.py --check    # exit 1 when it is not current

A test runs the check.
"""

import sys
from pathlib import Path

from reef_cli.core.errors import ReefError, leaves
from reef_cli.gateway.errors import passing

TARGET = Path(__file__).resolve().parent.parent / "docs" / "error-codes.md"
HEAD = """# Error codes

Every failure Reef foresees has one of these codes. They are stable: programs may decide by them. This page is generated from
`reef_cli/core/errors.py` by `scripts/error_codes.py`.

- `/reef/*` routes answer `{"error": {"code", "message", "why"?, "hint"?, "details"?, "request_id"}}`.
- Inference routes answer in their own dialect: OpenAI `{"error": {"message", "type", "param", "code"}}`, Anthropic
  `{"type": "error", "error": {"type", "message"}, "request_id"}`.
- 429 and 503 always carry `retry-after` in seconds. Final errors avoid the words by which agents recognise a passing trouble;
  passing ones (429 and 5xx) always carry one.
- The command line prints message, reason and hint, and exits with the code below.

| code | HTTP | exit | again? | when |
|---|---|---|---|---|
"""


def row(cls: type[ReefError]) -> str:
    """One line of the table; the meaning is the class's own first sentence."""
    meaning = " ".join((cls.__doc__ or "").split("\n\n")[0].split()).replace("|", "\\|")
    if cls is ReefError:
        meaning = "An unforeseen failure; the server's log has the details."
    again = "yes" if passing(cls.status) else "no"
    return f"| `{cls.code}` | {cls.status} | {cls.exit_code} | {again} | {meaning} |"


def page() -> str:
    """The whole page, rows by status, then code."""
    closed = [cls for cls in leaves() if cls.__module__ == ReefError.__module__]
    return HEAD + "\n".join(row(cls) for cls in sorted(closed, key=lambda cls: (cls.status, cls.code))) + "\n"


def main(arguments: list[str]) -> int:
    if "--check" in arguments:
        return 0 if TARGET.exists() and TARGET.read_text() == page() else 1
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
