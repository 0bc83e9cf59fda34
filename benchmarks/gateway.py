"""What the gateway costs: CPU, latency, rate and memory of requests and streams, beside a plain proxy and reef-infra.

Run: `python -m benchmarks.gateway [--out benchmarks/results/gateway.json]` (some five minutes). The servers run side by side on
one core, the stub provider and the clients on another; each case is measured in rounds, one server after the other, and the
medians are kept, and the round with the least CPU. CPU is the server process's own. `reef` records with `durability: process`,
`reef_power` and reef-infra sync each record to disk before they answer. On a busy machine wall times wander, CPU rises; trust
the ratios within one run. `direct` are the clients at the provider itself: a client that the system did not run for two
milliseconds finds two chunks whatever stands between. `raw` passes bytes on and knows nothing of them: what it takes for a
chunk is the system's and the event loop's.

The aims in microseconds were set on a machine where a plain proxy took 149 for a request and 4.2 for a chunk. Machines differ
by more than that, and one machine from hour to hour, so the same aims stand beside as multiples of the run's own plain proxy.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import experience, servers
from benchmarks.loopback import CHUNKS, GAP_S, Prompts, load, measure, rss_mb, running
from benchmarks.servers import Server, Unavailable

_TRAINING = """
import os
os.environ["OMP_NUM_THREADS"] = "1"
import numpy
weights = numpy.random.rand(512, 512).astype("float32")
inputs = numpy.random.rand(64, 512).astype("float32")
while True:
    outputs = inputs @ weights
    weights -= 1e-6 * (inputs.T @ (outputs - inputs))
"""
"""What a training step does to the other core: matrix products without end."""


@dataclass(frozen=True)
class Case:
    """One kind of load. `arms` are the servers that see it; `training` keeps the other core busy."""

    name: str
    size: int = 1024
    connections: int = 16
    stream: bool = False
    timed: bool = False
    training: bool = False
    arms: tuple[str, ...] = ("reef", "plain", "reef_infra")


CASES = (
    Case("1 KB, 1 connection", connections=1, arms=("reef", "reef_power", "plain", "reef_infra")),
    Case("1 KB, 16 connections", arms=("reef", "reef_power", "plain", "reef_infra")),
    Case("100 KB, 1 connection", size=102_400, connections=1),
    Case("100 KB, 16 connections", size=102_400),
    Case(f"stream of {CHUNKS} chunks, 1 connection", connections=1, stream=True),
    Case(f"stream of {CHUNKS} chunks, 16 connections", stream=True, arms=("reef", "plain", "raw", "reef_infra")),
    Case(
        f"stream of {CHUNKS} chunks {1e3 * GAP_S:g} ms apart, 1 connection",
        connections=1,
        stream=True,
        timed=True,
        arms=("reef", "direct", "plain", "reef_infra"),
    ),
    Case("1 KB, 16 connections, training on the other core", training=True),
)


def run(seconds: float, rounds: int, rows: int, with_infra: bool) -> dict[str, Any]:
    cores = sorted(os.sched_getaffinity(0))
    core, other = cores[0], cores[-1]
    os.sched_setaffinity(0, {other})
    with contextlib.ExitStack() as stack:
        provider = stack.enter_context(servers.stub(other))
        url = provider.url
        arms = {
            "direct": provider,
            "reef": stack.enter_context(servers.reef(url, core)),
            "reef_power": stack.enter_context(servers.reef(url, core, "power")),
            "plain": stack.enter_context(servers.plain(url, core)),
            "raw": stack.enter_context(servers.raw(url, core)),
        }
        left_out = {}
        try:
            if not with_infra:
                raise Unavailable("left out by --without-infra")
            arms["reef_infra"] = stack.enter_context(servers.infra(url, core))
        except Unavailable as error:
            left_out["reef_infra"] = str(error)
        cases = {case.name: _case(case, arms, seconds, rounds, other) for case in CASES}
        memory = {
            name: {"at_start_mb": server.rss_at_start_mb, "after_load_mb": round(rss_mb(server.pid), 1)}
            for name, server in arms.items()
            if server is not provider
        }
        starts = {
            name: {"ready_s": server.ready_s, "cpu_s": server.start_cpu_s}
            for name, server in arms.items()
            if server is not provider
        }
    os.sched_setaffinity(0, cores)
    found = {"cases": cases, "memory": memory, "starts": {**starts, "reef_alone": _start(core)}, "left_out": left_out}
    return {**found, "writer": _writer(rows), "aims": {}}


def _case(case: Case, arms: Mapping[str, Server], seconds: float, rounds: int, other: int) -> dict[str, Any]:
    found: dict[str, list[dict[str, float]]] = {name: [] for name in case.arms if name in arms}
    prompts = Prompts(case.size, stream=case.stream, timed=case.timed)
    with _training(other) if case.training else contextlib.nullcontext():
        for _ in range(rounds):
            for name, values in found.items():
                server = arms[name]
                asyncio.run(load(server.port, prompts, case.connections, seconds / 4))
                values.append(measure(server.pid, load(server.port, prompts, case.connections, seconds)))
    results = {name: _summary(values, case) for name, values in found.items()}
    print(case.name, json.dumps(results), file=sys.stderr, flush=True)
    return results


def _summary(values: list[dict[str, float]], case: Case) -> dict[str, float]:
    middle = {name: round(statistics.median(value[name] for value in values), 3) for name in values[0]}
    middle["least_cpu_us_per_request"] = round(min(value["cpu_us_per_request"] for value in values), 3)
    if case.stream:
        middle["cpu_us_per_chunk"] = round(middle["cpu_us_per_request"] / CHUNKS, 3)
        middle["least_cpu_us_per_chunk"] = round(middle["least_cpu_us_per_request"] / CHUNKS, 3)
    return middle


@contextlib.contextmanager
def _training(core: int) -> Iterator[None]:
    with running([sys.executable, "-c", _TRAINING], core):
        time.sleep(1)
        yield


def _start(core: int) -> dict[str, float]:
    """The start alone, nothing else running: the best of three."""
    best = []
    for _ in range(3):
        with servers.reef("http://127.0.0.1:9", core) as server:
            best.append((server.ready_s, server.start_cpu_s))
    ready, cpu = min(best)
    return {"ready_s": ready, "cpu_s": cpu}


def _writer(rows: int) -> list[dict[str, Any]]:
    """Durable rows of 4 KB a second through the log's writer, 256 callers at once; the best of three."""
    found = []
    for durability in ("process", "power"):
        with tempfile.TemporaryDirectory() as folder:
            runs = []
            for number in range(3):
                place = Path(folder) / str(number)
                place.mkdir()
                runs.append(asyncio.run(experience.rate(place, durability, 256, rows)))
            found.append(max(runs, key=lambda one: float(one["rows_per_s"])))
    return found


def aims(found: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What was aimed at beside what was measured."""
    cases, memory = found["cases"], found["memory"]
    busy, timed, direct = cases["1 KB, 16 connections"], cases[CASES[6].name]["reef"], cases[CASES[6].name]["direct"]
    stream = cases[CASES[5].name]
    recorded = busy["reef"]["cpu_us_per_request"] / busy["plain"]["cpu_us_per_request"]
    streamed = stream["reef"]["cpu_us_per_chunk"] / stream["plain"]["cpu_us_per_chunk"]
    beyond = max(0.0, round(timed["chunks_merged_percent"] - direct["chunks_merged_percent"], 3))
    aimed: dict[str, tuple[float, float, bool]] = {
        "cpu_us_per_recorded_1_kb_request": (250, busy["reef"]["cpu_us_per_request"], False),
        "cpu_us_per_streamed_chunk": (8, stream["reef"]["cpu_us_per_chunk"], False),
        "times_the_plain_proxys_cpu_per_recorded_1_kb_request": (round(250 / 149, 2), round(recorded, 2), False),
        "times_the_plain_proxys_cpu_per_streamed_chunk": (round(8 / 4.2, 2), round(streamed, 2), False),
        "chunks_merged_percent_beyond_those_of_no_proxy": (0, beyond, False),
        "chunk_delay_p99_ms": (1, timed["chunk_delay_p99_ms"], False),
        "resident_mb": (90, memory["reef"]["after_load_mb"], False),
        "ready_s": (1, found["starts"]["reef_alone"]["ready_s"], False),
        "durable_4_kb_rows_per_s": (8000, found["writer"][0]["rows_per_s"], True),
    }
    if "reef_infra" in busy:
        times = busy["reef"]["requests_per_s"] / busy["reef_infra"]["requests_per_s"]
        synced = busy["reef_power"]["requests_per_s"] / busy["reef_infra"]["requests_per_s"]
        aimed["times_the_requests_per_s_of_reef_infra"] = (3, round(times, 2), True)
        aimed["times_the_same_with_power_durability"] = (3, round(synced, 2), True)
    return {
        name: {"aim": aim, "measured": measured, "met": measured >= aim if more else measured <= aim}
        for name, (aim, measured, more) in aimed.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of one round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=8000, help="rows of one run of the writer")
    parser.add_argument("--without-infra", action="store_true", help="leave reef-infra out")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started ends too
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}
    head = {"commit": commit, "machine": machine, "load_before": round(os.getloadavg()[0], 2)}
    found = run(args.seconds, args.rounds, args.rows, not args.without_infra)
    found["aims"] = aims(found)
    text = json.dumps({**head, **found}, indent=2) + "\n"
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
