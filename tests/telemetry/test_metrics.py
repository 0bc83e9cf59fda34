"""The exposition is what Prometheus reads: checked line by line against the text format."""

import re
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reef_cli.telemetry.metrics import Counter, Gauge, Histogram, Metric, Metrics

SAMPLE = re.compile(r'^[a-z_]+(\{([a-z_]+="(\\.|[^"\\\n])*",?)*\})? (-?\d+(\.\d+)?(e[+-]?\d+)?|[+-]Inf|NaN)$')


def lines(metric: Metric) -> list[str]:
    return list(metric.expose())


def test_a_counter() -> None:
    counter = Counter("x_total", "Help\nme \\ now.", ("a",))
    assert lines(counter) == ["# HELP x_total Help\\nme \\\\ now.", "# TYPE x_total counter"]
    counter.inc(a="1")
    counter.inc(2.5, a="1")
    assert lines(counter)[2:] == ['x_total{a="1"} 3.5']
    assert counter.value(a="1") == 3.5
    assert counter.value(a="2") == 0
    with pytest.raises(ValueError, match="grows"):
        counter.inc(-1, a="1")
    with pytest.raises((ValueError, KeyError)):
        counter.inc(b="1")
    with pytest.raises(ValueError, match="labels"):
        counter.inc(a="1", b="2")


def test_a_gauge_forgets_what_is_gone() -> None:
    gauge = Gauge("x", "Help.", ("release",))
    gauge.set(1, release="r0")
    gauge.clear()
    gauge.set(1, release="r1")
    gauge.add(0.5, release="r1")
    assert lines(gauge)[2:] == ['x{release="r1"} 1.5']
    assert lines(Gauge("y", "Help."))[2:] == ["y 0"]


def test_a_histogram_is_cumulative_and_its_edges_are_inclusive() -> None:
    histogram = Histogram("h", "Help.", ("r",), (1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value, r="x")
    assert lines(histogram)[2:] == [
        'h_bucket{r="x",le="1"} 2',
        'h_bucket{r="x",le="2"} 3',
        'h_bucket{r="x",le="+Inf"} 4',
        'h_sum{r="x"} 12',
        'h_count{r="x"} 4',
    ]
    assert histogram.count(r="x") == 4
    assert histogram.count(r="y") == 0


@given(st.text(max_size=20))
def test_any_label_value_stays_on_its_line(value: str) -> None:
    counter = Counter("x_total", "Help.", ("a",))
    counter.inc(a=value)
    assert "\n" not in lines(counter)[2]
    assert SAMPLE.match(lines(counter)[2])


def test_series_are_bounded() -> None:
    counter = Counter("x_total", "Help.", ("scenario",))
    for number in range(2000):
        counter.inc(scenario=f"s{number}")
    assert len(lines(counter)) <= 2 + 501
    assert counter.value(scenario="other") == 1500


def test_the_whole_exposition() -> None:
    metrics = Metrics()
    metrics.requests.inc(route="/v1", method="POST", status="200")
    metrics.swap_seconds.observe(0.2)
    metrics.collect(lambda: metrics.queue.set(3, scenario="s"))
    metrics.collect(lambda: 1 / 0)
    text = metrics.expose()
    assert text.endswith("\n")
    assert 'reef_queue_samples{scenario="s"} 3' in text
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names)) == len(list(metrics.families()))
    assert all(name.startswith("reef_") for name in names)
    for line in text.splitlines():
        assert line.startswith("#") or SAMPLE.match(line), line


def test_threads_lose_nothing() -> None:
    counter, histogram = Counter("x_total", "Help.", ()), Histogram("h", "Help.", ("r",), (1.0,))
    read: list[float] = []

    def work() -> None:
        for number in range(5000):
            counter.inc()
            histogram.observe(number % 3, "x")
            if number % 500 == 0:
                read.append(counter.value())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counter.value() == 20000
    assert lines(histogram)[2:] == [
        'h_bucket{r="x",le="1"} 13336',
        'h_bucket{r="x",le="+Inf"} 20000',
        'h_sum{r="x"} 19996',
        'h_count{r="x"} 20000',
    ]
    assert 0 < max(read) <= 20000


def test_labels_by_place_are_the_same_as_by_name_in_any_order() -> None:
    counter, histogram = Counter("x_total", "Help.", ("a", "b")), Histogram("h", "Help.", ("a",))
    counter.inc(1.0, "1", "2")
    counter.inc(2.0, b="2", a="1")
    assert lines(counter)[2:] == ['x_total{a="1",b="2"} 3']
    histogram.observe(0.1, "1")
    histogram.observe(0.1, a="1")
    assert histogram.count(a="1") == 2
    for wrong in (("1",), ("1", "2", "3"), ()):
        with pytest.raises(ValueError, match="labels"):
            counter.inc(1.0, *wrong)


@given(st.lists(st.floats(-5, 5) | st.sampled_from([0.0, 1.0, 2.0]), max_size=300))
def test_values_reckoned_up_together_are_in_their_buckets(values: list[float]) -> None:
    histogram = Histogram("h", "Help.", (), (0.0, 1.0, 2.0))
    for value in values:
        histogram.observe(value)
    found = [line.rpartition(" ")[2] for line in lines(histogram)[2:]]
    expected = [sum(value <= bound for value in values) for bound in (0.0, 1.0, 2.0)]
    if values:
        assert [int(count) for count in found[:3]] == expected
        assert (int(found[3]), int(found[5])) == (len(values), len(values))
        assert float(found[4]) == pytest.approx(sum(values), abs=1e-9)
    else:
        assert found == []
