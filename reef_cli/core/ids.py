"""Ids: time-ordered, unique across processes, safe in URLs, file names and git refs.

A record id (receipt) is a UUIDv7 (RFC 9562 section 5.7) as 32 lower-case hex digits: sorts by time, so index pages are
appended to instead of split. Within one process ids are strictly increasing, also inside one millisecond.
"""

import os
import re
import threading
import time
from typing import NewType

RecordId = NewType("RecordId", str)
ReleaseId = NewType("ReleaseId", str)
JobId = NewType("JobId", str)
ContentId = NewType("ContentId", str)

_SCENARIO = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_RELEASE = re.compile(r"r(\d+)-[0-9a-f]{8}")

_lock = threading.Lock()
_last = ""


class Chance:
    """The system's randomness as pieces of hex digits, fetched for many ids at once: to ask for each costs more than the id.

    `keep` and `put` say which bits of each piece are random and what the others are.
    """

    _PIECES = 256

    def __init__(self, size: int, keep: bytes = b"", put: bytes = b"") -> None:
        self._size = size
        self._keep = int.from_bytes((keep or b"\xff" * size) * self._PIECES)
        self._put = int.from_bytes((put or bytes(size)) * self._PIECES)
        self._left: list[str] = []
        os.register_at_fork(after_in_child=self._start_anew)

    def draw(self) -> str:
        """`2 * size` digits that nobody can foresee and no one else gets, in this process or another. Takes no lock."""
        while True:
            try:
                return self._left.pop()
            except IndexError:
                self._left = self._fetched()

    def _fetched(self) -> list[str]:
        size = self._size * self._PIECES
        text = (int.from_bytes(os.urandom(size)) & self._keep | self._put).to_bytes(size).hex()
        return [text[at : at + 2 * self._size] for at in range(0, 2 * size, 2 * self._size)]

    def _start_anew(self) -> None:
        """In a forked child: what is left belongs to the parent."""
        self._left = []


# Behind the time of a UUIDv7: version 7 and variant 0b10 among 74 random bits.
_tails = Chance(10, bytes.fromhex("0fff3fffffffffffffff"), bytes.fromhex("70008000000000000000"))
_words = Chance(16)


def new_id() -> str:
    """A fresh UUIDv7 as 32 hex digits, greater than every id this process made before."""
    global _last
    found = f"{time.time_ns() // 1_000_000:012x}{_tails.draw()}"
    with _lock:
        if found <= _last:
            # Same millisecond, or the clock stepped back: count up in the 62 random bits, keeping version and variant.
            found = f"{int(_last, 16) + 1:032x}"
        _last = found
    return found


def random_hex(digits: int) -> str:
    """Up to 32 random hex digits."""
    return _words.draw()[:digits]


def new_release_id(step: int) -> ReleaseId:
    """`r<step>-<8 hex>`: readable, unique, and sorted by eye; `step` counts the releases before it in the chain."""
    return ReleaseId(f"r{step}-{random_hex(8)}")


def release_step(release_id: str) -> int | None:
    """The step in a release id, or None when the text is no release id."""
    match = _RELEASE.fullmatch(release_id)
    return int(match[1]) if match else None


def valid_scenario(name: str) -> bool:
    """Scenario names are 1 to 64 of letters, digits, `.`, `_`, `-`, start with a letter or digit, and hold no `..`.

    That makes them safe as a git ref, a file name and a URL segment.
    """
    return _SCENARIO.fullmatch(name) is not None and ".." not in name and not name.endswith((".", ".lock"))


def weight_version(scenario: str, release_id: str) -> str:
    """The label an engine carries for a scenario's release: `<scenario>@<release>`."""
    return f"{scenario}@{release_id}"


def split_weight_version(label: str) -> tuple[str, str] | None:
    """`(scenario, release_id)` of a label made by `weight_version`; None for foreign labels such as `base`."""
    scenario, at, release = label.rpartition("@")
    return (scenario, release) if at and release_step(release) is not None else None
