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

    def _key(self, values: Mapping[str, str], series: Mapping[tuple[str, ...], object]) -> tuple[str, ...]:
        key: tuple[str, ...] = self._pick(values)
        if len(values) != len(self.labels):
            raise ValueError(f"{self.name} has the labels {self.labels}, got {sorted(values)}")
        if key not in series and len(series) >= _MAX_SERIES:
            return ("other",) * len(self.labels)
        return key

    def lines(self) -> Iterator[str]:
        raise NotImplementedError

    def expose(self) -> Iterator[str]:
        yield f"# HELP {self.name} {_escape_help(self.help)}"
        yield f"# TYPE {self.name} {self.kind}"
        yield from self.lines()


class _Scalar(Metric):
    def __init__(self, name: str, help: str, labels: Sequence[str] = ()) -> None:
        super().__init__(name, help, labels)
        self._series: dict[tuple[str, ...], float] = {} if labels else {(): 0.0}

    def value(self, **labels: str) -> float:
        """The value of one series, 0 when it has none."""
        with self._lock:
            return self._series.get(tuple([labels[label] for label in self.labels]), 0.0)

    def _add(self, amount: float, labels: Mapping[str, str]) -> None:
        with self._lock:
            key = self._key(labels, self._series)
            self._series[key] = self._series.get(key, 0.0) + amount

    def lines(self) -> Iterator[str]:
        with self._lock:
            series = list(self._series.items())
        for key, value in series:
            yield f"{self.name}{_label_text(self.labels, key)} {_number(value)}"


class Counter(_Scalar):
    """Only grows; the name ends in `_total`."""

    kind = "counter"

    def inc(self, amount: float = 1.0, **labels: str) -> None:
        if amount < 0:
            raise ValueError("a counter only grows")
        self._add(amount, labels)


class Gauge(_Scalar):
    """A value that goes up and down."""

    kind = "gauge"

    def set(self, value: float, **labels: str) -> None:
        with self._lock:
            self._series[self._key(labels, self._series)] = value

    def add(self, amount: float, **labels: str) -> None:
        self._add(amount, labels)

    def clear(self) -> None:
        """Forget every series, so that a collector can set only those that still exist."""
        with self._lock:
            self._series = {}


class Histogram(Metric):
    """Observations in cumulative buckets; `bounds` are upper edges, inclusive, ascending."""

    kind = "histogram"

    def __init__(self, name: str, help: str, labels: Sequence[str] = (), bounds: Sequence[float] = _SECONDS) -> None:
        super().__init__(name, help, labels)
        self.bounds = tuple(bounds)
        self._series: dict[tuple[str, ...], tuple[list[int], list[float]]] = {}

    def observe(self, value: float, **labels: str) -> None:
        with self._lock:
            key = self._key(labels, self._series)
            if key not in self._series:
                self._series[key] = ([0] * (len(self.bounds) + 1), [0.0])
            counts, total = self._series[key]
            counts[bisect.bisect_left(self.bounds, value)] += 1
            total[0] += value

    def count(self, **labels: str) -> int:
        """How many values were observed in one series."""
        with self._lock:
            counts, _ = self._series.get(tuple([labels[label] for label in self.labels]), ([], []))
            return sum(counts)

    def lines(self) -> Iterator[str]:
        with self._lock:
            series = [(key, list(counts), total[0]) for key, (counts, total) in self._series.items()]
        for key, counts, total in series:
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
