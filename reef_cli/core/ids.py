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
_last = 0


class Chance:
    """The system's randomness, fetched for many ids at once: a call to the system for each costs more than the id."""

    _FETCHED = 4096

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left = b""
        self._at = 0
        os.register_at_fork(after_in_child=self._start_anew)

    def bits(self, count: int) -> int:
        """`count` random bits that nobody can foresee and no other process gets, up to 1024."""
        size = (count + 7) // 8
        with self._lock:
            if self._at + size > len(self._left):
                self._left, self._at = os.urandom(self._FETCHED), 0
            found = self._left[self._at : self._at + size]
            self._at += size
        return int.from_bytes(found) >> 8 * size - count

    def _start_anew(self) -> None:
        """In a forked child: what is left belongs to the parent, whose thread may hold the lock."""
        self._lock, self._left, self._at = threading.Lock(), b"", 0


_chance = Chance()


def new_id() -> str:
    """A fresh UUIDv7 as 32 hex digits, greater than every id this process made before."""
    global _last
    chance = _chance.bits(74)
    stamp = (time.time_ns() // 1_000_000) << 80 | 0x7 << 76 | (chance >> 62) << 64 | 0b10 << 62 | chance & (1 << 62) - 1
    with _lock:
        if stamp <= _last:
            # Same millisecond, or the clock stepped back: count up in the 62 random bits, keeping version and variant.
            stamp = _last + 1
        _last = stamp
    return f"{stamp:032x}"


def random_hex(digits: int) -> str:
    """So many random hex digits."""
    return f"{_chance.bits(4 * digits):0{digits}x}"


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
