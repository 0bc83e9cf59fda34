"""Half the highest load for minutes: memory and descriptors must stay as they are, and every receipt must be in the log.

Run: `python -m benchmarks.soak [--minutes 10] [--out benchmarks/results/soak.json]`. A real `reef serve` over a stub provider;
first the rate of a closed loop is taken, then 16 paced connections (unstreamed, streamed, 100 KB) keep about half of it. The
first fifth is warm-up; what is compared is the highest memory of the next fifth with the highest of the last.
"""

import argparse
import asyncio
import json
import os
import platform
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import servers
from benchmarks.loopback import TOKEN, Found, Prompts, cpu_seconds, descriptors, load, rss_mb

CONNECTIONS = 16
MEMORY_AIM_MB = 5.0
_KINDS = (Prompts(1024), Prompts(1024), Prompts(1024, stream=True), Prompts(102_400))


async def _half_load(server: servers.Server, seconds: float, pace_s: float) -> tuple[list[Found], list[dict[str, float]]]:
    """Four connections of each kind, and a look at the process every second or so."""
    looks: list[dict[str, float]] = []
    started = time.perf_counter()

    async def look() -> None:
        while True:
            at = {"at_s": time.perf_counter() - started, "rss_mb": rss_mb(server.pid), "fds": float(descriptors(server.pid))}
            looks.append(at)
            await asyncio.sleep(max(0.25, seconds / 600))

    looking = asyncio.create_task(look())
    share = CONNECTIONS // len(_KINDS)
    found = await asyncio.gather(*(load(server.port, prompts, share, seconds, pace_s=pace_s) for prompts in _KINDS))
    looking.cancel()
    return found, looks


def run(minutes: float) -> dict[str, Any]:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[-1]})
    seconds = 60 * minutes
    with servers.stub(cores[-1]) as provider, servers.reef(provider.url, cores[0]) as server:
        found, _ = asyncio.run(_half_load(server, max(3.0, seconds / 40), 0.0))
        full = sum(len(one.latencies) for one in found) / max(3.0, seconds / 40)
        before = cpu_seconds(server.pid)
        paced, looks = asyncio.run(_half_load(server, seconds, 2 * CONNECTIONS / full))
        receipts = [receipt for one in (*found, *paced) for receipt in one.receipts]
        return {
            "minutes": minutes,
            "full_requests_per_s": round(full, 1),
            "half_requests_per_s": round(sum(len(one.latencies) for one in paced) / seconds, 1),
            "cores_used": round((cpu_seconds(server.pid) - before) / seconds, 3),
            "receipts": len(receipts),
            "receipts_missing": _missing(server, receipts),
            **_drift(looks, seconds),
        }


def _missing(server: servers.Server, receipts: Sequence[str]) -> int:
    """How many receipts of unstreamed answers the log does not know; every hundredth is asked for, and the last ones."""
    asked = [*receipts[::100], *receipts[-20:]]
    return sum(not _known(server, receipt) for receipt in asked)


def _known(server: servers.Server, receipt: str) -> bool:
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/reef/scenarios/default/records/{receipt}",
        headers={"Authorization": f"Bearer {TOKEN}", "x-reef-scenario": "default"},
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return bool(json.load(answer)["id"] == receipt)
    except OSError:
        return False


def _drift(looks: Sequence[dict[str, float]], seconds: float) -> dict[str, Any]:
    early = [look for look in looks if 0.2 * seconds <= look["at_s"] < 0.4 * seconds]
    late = [look for look in looks if look["at_s"] >= 0.8 * seconds]
    memory = [max(look["rss_mb"] for look in part) for part in (early, late)]
    open_files = [max(look["fds"] for look in part) for part in (early, late)]
    return {
        "rss_mb": {"after_warm_up": round(memory[0], 1), "end": round(memory[1], 1), "highest": _highest(looks, "rss_mb")},
        "descriptors": {"after_warm_up": open_files[0], "end": open_files[1], "highest": _highest(looks, "fds")},
        "memory_flat": {
            "aim": MEMORY_AIM_MB,
            "grew_mb": round(memory[1] - memory[0], 2),
            "met": memory[1] - memory[0] <= MEMORY_AIM_MB,
        },
        "descriptors_flat": {"aim": 0, "grew": open_files[1] - open_files[0], "met": open_files[1] <= open_files[0]},
    }


def _highest(looks: Sequence[dict[str, float]], name: str) -> float:
    return round(max(look[name] for look in looks), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started ends too
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}
    head = {"commit": commit, "machine": machine, "load_before": round(os.getloadavg()[0], 2)}
    text = json.dumps({**head, **run(args.minutes)}, indent=2) + "\n"
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
