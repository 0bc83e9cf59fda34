"""A token bucket per caller, used only when a rate is configured. Pure arithmetic over a given time."""

from dataclasses import dataclass

from reef_cli.core.errors import RateLimited

_MOST_CALLERS = 10_000


@dataclass(slots=True)
class _Bucket:
    level: float
    at: float


class RateLimit:
    """`rate` requests a second for each caller, with a burst of twice that (at least one)."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._burst = max(1.0, 2 * rate)
        self._buckets: dict[str, _Bucket] = {}

    def take(self, caller: str, now: float) -> None:
        """Count one request at monotonic second `now`; `RateLimited` says how long to wait when there is none left."""
        bucket = self._buckets.get(caller)
        if bucket is None:
            self._forget(now)
            bucket = self._buckets[caller] = _Bucket(self._burst, now)
        bucket.level = min(self._burst, bucket.level + (now - bucket.at) * self._rate)
        bucket.at = now
        if bucket.level < 1:
            wait = (1 - bucket.level) / self._rate
            raise RateLimited("too many requests for this token: rate limit reached", retry_after_s=wait)
        bucket.level -= 1

    def _forget(self, now: float) -> None:
        """Drop callers whose bucket is full again: they are as good as new."""
        if len(self._buckets) < _MOST_CALLERS:
            return
        full = self._burst / self._rate
        self._buckets = {name: bucket for name, bucket in self._buckets.items() if now - bucket.at < full}
