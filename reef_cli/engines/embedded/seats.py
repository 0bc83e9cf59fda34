"""Which slot holds whose keys: seats, and the reuse of a prefix that a slot still holds.

A seat's `tokens` are exactly those whose keys are in its slot, made under `key` = (adapter number, weights epoch); None marks
keys that mix weights and may never be reused. A new request takes over an idle seat when that loses little, else the common
prefix is copied from the best seat, which may be running, into the least recently used idle one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from reef_cli.engines.embedded.request import Request

Key = tuple[int, int]
_COPY_FROM = 16
"""Shorter prefixes are cheaper to compute again than to copy."""


@dataclass(slots=True)
class Seat:
    """One KV slot."""

    slot: int
    request: Request | None = None
    tokens: list[int] = field(default_factory=list)
    key: Key | None = None
    used: int = 0


class Seats:
    """All slots of the engine."""

    def __init__(self, count: int, copy: Callable[[int, int, int], None]) -> None:
        self._seats = [Seat(slot) for slot in range(count)]
        self._copy = copy
        self._tick = 0

    def __getitem__(self, slot: int) -> Seat:
        return self._seats[slot]

    @property
    def cached_tokens(self) -> int:
        """Tokens whose keys are held by idle seats."""
        return sum(len(seat.tokens) for seat in self._seats if seat.request is None)

    def take(self, request: Request, key: Key, limit: int) -> Seat | None:
        """Seat a request, reusing at most `limit` tokens of a held prefix; None when every seat is busy."""
        idle = [seat for seat in self._seats if seat.request is None]
        if not idle:
            return None
        best, shared = self._best(request.tokens, key, limit)
        if best is not None and best.request is None and 2 * shared >= len(best.tokens):
            seat = best
        else:
            seat = min(idle, key=lambda each: (bool(each.tokens), each.used, each.slot))
            if best is not None and best is not seat and shared >= _COPY_FROM:
                self._copy(best.slot, seat.slot, shared)
            elif best is not seat:
                shared = 0
        seat.tokens, seat.key = request.tokens[:shared], key
        seat.request = request
        request.slot, request.filled = seat.slot, shared
        return seat

    def _best(self, tokens: Sequence[int], key: Key, limit: int) -> tuple[Seat | None, int]:
        best, longest = None, 0
        for seat in self._seats:
            if seat.key == key:
                shared = min(common_prefix(seat.tokens, tokens), limit)
                if shared > longest or (shared == longest and best is not None and best.request and not seat.request):
                    best, longest = seat, shared
        return best, longest

    def leave(self, request: Request) -> None:
        """Free the request's seat; what it holds stays for reuse."""
        if request.slot is not None:
            self._tick += 1
            seat = self._seats[request.slot]
            seat.request, seat.used = None, self._tick
            request.slot = None

    def discard(self, request: Request) -> None:
        """Free the request's seat and forget what it holds."""
        if request.slot is not None:
            seat = self._seats[request.slot]
            seat.key, seat.tokens = None, []
            self.leave(request)

    def forget(self) -> None:
        """Nothing held now may be reused: idle seats are emptied, running ones marked as mixed."""
        for seat in self._seats:
            seat.key = None
            if seat.request is None:
                seat.tokens = []


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common beginning; compares whole stretches before single tokens."""
    end = min(len(a), len(b))
    at = 0
    while at < end and a[at : at + 128] == b[at : at + 128]:
        at += 128
    at = min(at, end)
    while at < end and a[at] == b[at]:
        at += 1
    return at
