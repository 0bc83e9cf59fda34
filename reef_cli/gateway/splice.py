"""Changing one top-level member of a JSON object in its bytes, so that everything else goes on as the client wrote it.

The object is known to be valid JSON. Scanning jumps from one string or bracket to the next and stops at the member.
"""

import re

_TOKENS = re.compile(rb'"(?:[^"\\]|\\.)*"|[{}\[\],]', re.DOTALL)
_COLON = re.compile(rb"\s*:\s*")


def replace_member(raw: bytes, name: str, value: bytes) -> bytes:
    """The object with the member's value replaced; `KeyError` when it has no such member."""
    start, end = _value_span(raw, name)
    return raw[:start] + value + raw[end:]


def add_member(raw: bytes, name: str, value: bytes) -> bytes:
    """The object with one more member at its end."""
    brace = raw.rindex(b"}")
    empty = raw[:brace].rstrip().endswith(b"{")
    return b"".join((raw[:brace], b"" if empty else b",", b'"', name.encode(), b'":', value, raw[brace:]))


def _value_span(raw: bytes, name: str) -> tuple[int, int]:
    """Where the value of a top-level member starts and ends. Names written with escapes are not found."""
    key = b'"' + name.encode() + b'"'
    depth = 0
    at_key = False
    start = -1
    for match in _TOKENS.finditer(raw):
        token = match[0]
        if token in (b"{", b"["):
            depth += 1
            at_key = depth == 1
        elif token in (b"}", b"]"):
            depth -= 1
        if start >= 0 and match.start() >= start and ((token == b"," and depth == 1) or depth == 0):
            return start, _trimmed(raw, start, match.start())
        if token == b"," and depth == 1:
            at_key = True
        elif at_key and depth == 1 and token[:1] == b'"':
            at_key = False
            colon = _COLON.match(raw, match.end())
            if token == key and colon is not None:
                start = colon.end()
    raise KeyError(name)


def _trimmed(raw: bytes, start: int, end: int) -> int:
    return start + len(raw[start:end].rstrip())
