"""Counters, gauges and histograms with a Prometheus text exposition (format 0.0.4), and the catalogue of what Reef measures.

Label sets are few by design: names of scenarios come from clients, so each metric holds at most `_MAX_SERIES` label sets and
counts the rest under `other`. Values that live elsewhere (queues, heads, ages) are gauges filled by collectors just before a
scrape. Safe to use from any thread. Knows nothing of HTTP.
"""

import bisect
import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_MAX_SERIES = 500
_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_STEPS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
_AT_ONCE = 128
"""Values of one series that are reckoned up together."""
_log = logging.getLogger(__name__)


class Metric:
    """One metric family: name, help, label names, and its series."""

    kind = "untyped"

    def __init__(self, name: str, help: str, labels: Sequence[str] = ()) -> None:
        self.name = name
        self.help = help
        self.labels = tuple(labels)
        # With one label `itemgetter` gives its bare value, so it serves from two on.
        self._pick = itemgetter(*labels) if len(labels) > 1 else lambda values: tuple([values[label] for label in labels])
        self._lock = threading.Lock()

    def _values(self, labels: Mapping[str, str]) -> tuple[str, ...]:
        if len(labels) != len(self.labels):
            raise ValueError(f"{self.name} has the labels {self.labels}, got {sorted(labels)}")
        values: tuple[str, ...] = self._pick(labels)
        return values

    def _bounded(self, values: tuple[str, ...], series: Mapping[tuple[str, ...], object]) -> tuple[str, ...]:
        return values if values in series or len(series) < _MAX_SERIES else ("other",) * len(self.labels)

    def lines(self) -> Iterator[str]:
        raise NotImplementedError

    def expose(self) -> Iterator[str]:
        yield f"# HELP {self.name} {_escape_help(self.help)}"
        yield f"# TYPE {self.name} {self.kind}"
        yield from self.lines()


class _Series:
    """What came lately, and the sum and counts of what came before."""

    __slots__ = ("counts", "lately", "total")

    def __init__(self, buckets: int) -> None:
        self.lately: list[float] = []
        self.total = 0.0
        self.counts = [0] * buckets


class _Gathering(Metric):
    """A family whose values are only put down when they come, and reckoned up many at once.

    Putting one down takes no lock: a list's `append` is one step for all threads. `bounds` are upper edges of buckets.
    """

    def __init__(self, name: str, help: str, labels: Sequence[str] = (), bounds: Sequence[float] = ()) -> None:
        super().__init__(name, help, labels)
        self.bounds = tuple(bounds)
        self._series: dict[tuple[str, ...], _Series] = {}

    def _put(self, value: float, values: tuple[str, ...], labels: Mapping[str, str]) -> None:
        if labels:
            values = self._values(labels)
        series = self._series.get(values)
        if series is None:
            series = self._begun(values)
        series.lately.append(value)
        if len(series.lately) >= _AT_ONCE:
            self._reckon(series)

    def _begun(self, values: tuple[str, ...]) -> _Series:
        if len(values) != len(self.labels):
            raise ValueError(f"{self.name} has the labels {self.labels}, got the values {values}")
        with self._lock:
            key = self._bounded(values, self._series)
            if (series := self._series.get(key)) is None:
                series = self._series[key] = _Series(len(self.bounds) + 1)
        return series

    def _reckon(self, series: _Series) -> None:
        with self._lock:
            self._add_up(series)

    def _add_up(self, series: _Series) -> None:
        """The caller holds the lock; what other threads put down meanwhile stays."""
        count = len(series.lately)
        values = sorted(series.lately[:count])
        del series.lately[:count]
        series.total += sum(values)
        at = 0
        for place, bound in enumerate(self.bounds):
            end = bisect.bisect_right(values, bound, at)
            series.counts[place] += end - at
            at = end
        series.counts[-1] += count - at

    def _all(self) -> list[tuple[tuple[str, ...], float, list[int]]]:
        with self._lock:
            for series in self._series.values():
                self._add_up(series)
            return [(key, series.total, list(series.counts)) for key, series in self._series.items()]

    def _one(self, labels: Mapping[str, str]) -> tuple[float, int]:
        """Sum and number of one series, zeros when it has none."""
        key = self._values(labels)
        return next(((total, sum(counts)) for found, total, counts in self._all() if found == key), (0.0, 0))


class Counter(_Gathering):
    """Only grows; the name ends in `_total`."""

    kind = "counter"

    def __init__(self, name: str, help: str, labels: Sequence[str] = ()) -> None:
        super().__init__(name, help, labels)
        if not labels:
            self._begun(())

    def inc(self, amount: float = 1.0, *values: str, **labels: str) -> None:
        """Labels go by name, or in their order as `values`, which takes half the time."""
        if amount < 0:
            raise ValueError("a counter only grows")
        self._put(amount, values, labels)

    def value(self, **labels: str) -> float:
        """The value of one series, 0 when it has none."""
        return self._one(labels)[0]

    def lines(self) -> Iterator[str]:
        for key, total, _ in self._all():
            yield f"{self.name}{_label_text(self.labels, key)} {_number(total)}"


class Gauge(Metric):
    """A value that goes up and down."""

    kind = "gauge"

    def __init__(self, name: str, help: str, labels: Sequence[str] = ()) -> None:
        super().__init__(name, help, labels)
        self._series: dict[tuple[str, ...], float] = {} if labels else {(): 0.0}

    def set(self, value: float, **labels: str) -> None:
        with self._lock:
            self._series[self._bounded(self._values(labels), self._series)] = value

    def add(self, amount: float, **labels: str) -> None:
        with self._lock:
            key = self._bounded(self._values(labels), self._series)
            self._series[key] = self._series.get(key, 0.0) + amount

    def value(self, **labels: str) -> float:
        """The value of one series, 0 when it has none."""
        with self._lock:
            return self._series.get(self._values(labels), 0.0)

    def clear(self) -> None:
        """Forget every series, so that a collector can set only those that still exist."""
        with self._lock:
            self._series = {}

    def lines(self) -> Iterator[str]:
        with self._lock:
            series = list(self._series.items())
        for key, value in series:
            yield f"{self.name}{_label_text(self.labels, key)} {_number(value)}"


class Histogram(_Gathering):
    """Observations in cumulative buckets; `bounds` are upper edges, inclusive, ascending."""

    kind = "histogram"

    def __init__(self, name: str, help: str, labels: Sequence[str] = (), bounds: Sequence[float] = _SECONDS) -> None:
        super().__init__(name, help, labels, bounds)

    def observe(self, value: float, *values: str, **labels: str) -> None:
        """Labels go by name, or in their order as `values`, which takes half the time."""
        self._put(value, values, labels)

    def count(self, **labels: str) -> int:
        """How many values were observed in one series."""
        return self._one(labels)[1]

    def lines(self) -> Iterator[str]:
        for key, total, counts in self._all():
            seen = 0
            for bound, count in zip((*self.bounds, math.inf), counts, strict=True):
                seen += count
                yield f"{self.name}_bucket{_label_text((*self.labels, 'le'), (*key, _number(bound)))} {seen}"
            yield f"{self.name}_sum{_label_text(self.labels, key)} {_number(total)}"
            yield f"{self.name}_count{_label_text(self.labels, key)} {seen}"


class Metrics:
    """The catalogue. Rooms record into its attributes; `collect` adds a function that fills gauges before each scrape."""

    def __init__(self) -> None:
        self.requests = Counter("reef_requests_total", "Finished HTTP requests.", ("route", "method", "status"))
        self.request_seconds = Histogram("reef_request_seconds", "Whole time of a request.", ("route",))
        self.overhead_seconds = Histogram(
            "reef_gateway_overhead_seconds",
            "Time of an inference request minus its wait for the engine or provider.",
            ("route",),
        )
        self.running = Gauge("reef_requests_running", "Requests being served.")
        self.first_token_seconds = Histogram("reef_first_token_seconds", "Time to the first streamed piece.", ("dialect",))
        self.tokens = Counter("reef_tokens_total", "Tokens read and written.", ("scenario", "direction"))
        self.records = Counter("reef_records_total", "Stored records.", ("scenario", "kind"))
        self.incomplete = Counter("reef_incomplete_total", "Records marked incomplete, by cause.", ("scenario", "cause"))
        self.refused = Counter("reef_refused_total", "Requests refused with an error code.", ("code",))
        self.reports = Counter("reef_report_references_total", "Cited receipts by eligibility reason.", ("scenario", "reason"))
        self.dropped = Counter("reef_samples_dropped_total", "Samples that will not train, by reason.", ("scenario", "reason"))
        self.jobs = Counter("reef_jobs_total", "Ended learning jobs by outcome.", ("scenario", "outcome"))
        self.job_seconds = Histogram("reef_job_phase_seconds", "Time of a job's phases.", ("phase",))
        self.staleness = Histogram(
            "reef_sample_staleness", "Staleness of trained samples in publications.", ("scenario",), _STEPS
        )
        self.swaps = Counter("reef_swaps_total", "Releases loaded into the engine, by result.", ("result",))
        self.swap_seconds = Histogram("reef_swap_seconds", "Time to load a release into the engine.", ())
        self.shadows = Counter(
            "reef_shadow_answers_total", "Answers offered to a shadow, by what came of them.", ("scenario", "result")
        )
        self.queue = Gauge("reef_queue_samples", "Samples waiting to train.", ("scenario",))
        self.oldest_unread = Gauge(
            "reef_oldest_unread_seconds", "Age of the oldest experience learning has not looked at.", ("scenario",)
        )
        self.release_info = Gauge("reef_release_info", "The served release.", ("scenario", "release_id", "content_id"))
        self.release_step = Gauge("reef_release_step", "Step of the served release.", ("scenario",))
        self.event_streams = Gauge("reef_event_streams", "Open event streams.")
        self.draining = Gauge("reef_draining", "1 while the server shuts down.")
        self.info = Gauge("reef_info", "Version and engine.", ("version", "engine", "model"))
        self._collectors: list[Callable[[], None]] = []

    def families(self) -> Iterable[Metric]:
        """Every metric, in the catalogue's order."""
        return [value for value in vars(self).values() if isinstance(value, Metric)]

    def collect(self, collector: Callable[[], None]) -> None:
        self._collectors.append(collector)

    def expose(self) -> str:
        """The exposition; a collector that fails is logged and its gauges keep their last values."""
        for collector in self._collectors:
            try:
                collector()
            except Exception:
                # A process edge: monitoring must not go dark because one source of a gauge is broken.
                _log.exception("a metrics collector failed")
        return "\n".join(line for family in self.families() for line in family.expose()) + "\n"


def _escape_help(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _label_text(names: Sequence[str], values: Sequence[str]) -> str:
    if not names:
        return ""
    pairs = (f'{name}="{_escape_label(value)}"' for name, value in zip(names, values, strict=True))
    return "{" + ",".join(pairs) + "}"


def _escape_label(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    if math.isnan(value):
        return "NaN"
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))
