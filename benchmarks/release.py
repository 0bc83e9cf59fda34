"""Times of the release store: store, publish, promote, rollback, and listing a chain of 1,000 from a fresh process.

Run: `python -m benchmarks.release [--chain 1000] [--large-mb 256] [--home DIR] [--out benchmarks/results/release.json]`. Wall
times in ms (median, p95); everything is fsynced, so the disk is part of them: `fsync_ms` is what one small fsync costs here.
Bars: publish, promote and rollback <= 50 ms besides the bytes; bytes at 1 GB/s; a listing of 1,000 in <= 100 ms.
"""

import argparse
import hashlib
import json
import os
import resource
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gate import machine
from reef_cli.core.types import Artifact, Draft, Operation, Surface
from reef_cli.releases import ReleaseService

LISTING = """
import resource, sys, time
from pathlib import Path
from reef_cli.releases import ReleaseService
def cpu():
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
wall, used = time.perf_counter(), cpu()
count = len(ReleaseService(Path(sys.argv[1])).list("s"))
print(count, (time.perf_counter() - wall) * 1e3, (cpu() - used) * 1e3)
"""


def timed(times: int, work: Callable[[int], object]) -> dict[str, float]:
    """Median and 95th percentile in ms of `work(0..times-1)`, and the mean CPU ms with that of the git processes."""
    spent = []
    used = cpu_s()
    for index in range(times):
        started = time.perf_counter()
        work(index)
        spent.append((time.perf_counter() - started) * 1e3)
    used = (cpu_s() - used) / times * 1e3
    spent.sort()
    return {
        "cpu_ms": round(used, 2),
        "median_ms": round(statistics.median(spent), 2),
        "p95_ms": round(spent[int(0.95 * (times - 1))], 2),
        "runs": times,
    }


def cpu_s() -> float:
    """CPU seconds of this process and its ended children: steadier than wall time on a shared machine."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def fsync_ms(folder: Path) -> float:
    path = folder / "probe"

    def once(index: int) -> None:
        with path.open("wb") as file:
            file.write(b"x" * 512)
            os.fsync(file.fileno())

    return timed(20, once)["median_ms"]


def adapter(folder: Path, size: int, seed: int) -> Path:
    """A PEFT folder with `size` bytes of weights, different for each seed."""
    folder.mkdir(exist_ok=True)
    header = {"base_model.model.q_proj.lora_A.weight": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
    text = json.dumps(header).encode()
    with (folder / "adapter_model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        block = hashlib.sha256(str(seed).encode()).digest() * 32768
        for start in range(0, size, len(block)):
            file.write(block[: size - start])
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "tiny", "r": 8}))
    return folder


def draft(artifact: Artifact, **evidence: Any) -> Draft:
    return Draft(artifact.content_id, artifact.kind, Surface.WEIGHTS, Operation.TRAINING, "benchmark", evidence)


def measure_steps(home: Path) -> dict[str, Any]:
    """A life of small adapters: store, publish, hold and promote, roll back."""
    service = ReleaseService(home / "steps")
    artifacts: list[Artifact] = []
    source = home / "adapter"

    def store(index: int) -> None:
        artifacts.append(service.store(source, "lora"))

    stored = []
    for seed in range(12):
        adapter(source, 1_000_000, seed)
        stored.append(timed(1, store)["median_ms"])
    service.create("s", artifacts[0])
    publish = timed(12, lambda index: service.publish("s", draft(artifacts[index]), None))
    held = [service.hold("s", draft(artifacts[index]), None).release_id for index in range(12)]
    promote = timed(12, lambda index: service.promote("s", held[index]))
    rollback = timed(12, lambda index: service.rollback("s"))
    return {"store_1mb_ms": round(statistics.median(stored), 2), "publish": publish, "promote": promote, "rollback": rollback}


def measure_large(home: Path, megabytes: int) -> dict[str, Any]:
    """Storing one large adapter: the bytes' own speed, and its materialisation by hard link."""
    service = ReleaseService(home / "large")
    source = adapter(home / "large-adapter", megabytes * 1_000_000, 1)
    started = time.perf_counter()
    artifact = service.store(source, "lora")
    seconds = time.perf_counter() - started
    folder = timed(1, lambda index: service.directory(artifact.content_id))
    again = timed(1, lambda index: service.store(source, "lora"))
    rate = artifact.size / seconds / 1e9
    return {
        "megabytes": megabytes,
        "store_s": round(seconds, 3),
        "gb_per_s": round(rate, 3),
        "same_again_ms": again["median_ms"],
        "materialise_ms": folder["median_ms"],
    }


def measure_listing(home: Path, chain: int) -> dict[str, Any]:
    """Grow a chain, then list it from fresh processes: with loose objects, and packed as `gc` leaves them."""
    service = ReleaseService(home / "chain")
    artifacts = [service.store(adapter(home / "a", 120_000, seed), "lora") for seed in range(8)]
    head = service.create("s", artifacts[0])
    started = time.perf_counter()
    for index in range(chain - 1):
        facts = draft(artifacts[index % 8], candidate_mean=0.5, current_mean=0.4, metrics={"loss": index / chain})
        head = service.publish("s", facts, head.release_id)
    grown = time.perf_counter() - started
    loose = fresh_listing(home / "chain")
    service.gc(dry_run=False)
    packed = fresh_listing(home / "chain")
    warm = timed(10, lambda index: service.list("s"))
    return {
        "releases": chain,
        "publish_mean_ms": round(grown / chain * 1e3, 2),
        "fresh_loose": loose,
        "fresh_packed": packed,
        "warm": warm,
    }


def fresh_listing(home: Path) -> dict[str, float]:
    rows = []
    for _ in range(5):
        done = subprocess.run([sys.executable, "-c", LISTING, str(home)], capture_output=True, text=True, check=True)
        rows.append([float(word) for word in done.stdout.split()])
    return {
        "wall_ms": round(min(row[1] for row in rows), 1),
        "cpu_ms": round(min(row[2] for row in rows), 1),
        "count": rows[0][0],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chain", type=int, default=1000)
    parser.add_argument("--large-mb", type=int, default=256)
    parser.add_argument("--home", type=Path, help="where to work, on the disk to be measured")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.home, prefix="reef-bench-") as folder:
        home = Path(folder)
        result = {
            "what": "release store, everything fsynced",
            "fsync_ms": fsync_ms(home),
            "load": os.getloadavg()[0],
            **measure_steps(home),
            "large": measure_large(home, options.large_mb),
            "listing": measure_listing(home, options.chain),
            **machine(),
        }
    text = json.dumps(result, indent=1) + "\n"
    print(text, end="")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text)


if __name__ == "__main__":
    main()
