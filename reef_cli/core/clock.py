"""Time, passed in where a decision depends on it, so that tests can own it."""

import time
from typing import Protocol


class Clock(Protocol):
    """Wall time for records and monotonic time for durations, both in seconds."""

    def now(self) -> float: ...

    def monotonic(self) -> float: ...


class SystemClock:
    """The machine's own clock."""

    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()
