"""Text that came from models, agents or users, made safe for a terminal.

A model's answer may hold escape sequences that move the cursor, retitle the window or hide lines, and bidi overrides that
make one command look like another. Everything printed by the command line or the dashboard passes through here first.
"""

import re

_SEQUENCE = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI
    r"|\x1b[\]PX^_].*?(?:\x07|\x1b\\|$)"  # OSC, DCS, SOS, PM, APC up to their terminator
    r"|\x1b[ -/]*[0-~]?"  # two-character escapes and a lone ESC
    r"|\x9b[0-?]*[ -/]*[@-~]",  # CSI as one C1 byte
    re.DOTALL,
)
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u061c\u202a-\u202e\u2066-\u2069\ufeff]")


def plain(text: object) -> str:
    """`text` without escape sequences, control characters and bidi marks; newlines and tabs stay."""
    value = str(text).replace("\r\n", "\n")
    return _CONTROL.sub("", _SEQUENCE.sub("", value))


def one_line(text: object, width: int | None = None) -> str:
    """`plain` on one line, white space folded, cut with an ellipsis at `width` characters."""
    line = " ".join(plain(text).split())
    return line if width is None or len(line) <= width else line[: max(0, width - 1)] + "…"
