"""Durable inserts per second through the experience log's writer, and bytes per turn of a growing session.

Run: `python -m benchmarks.experience [--rows 6000] [--out benchmarks/results/experience.json]`. Each row is an exchange of
about 4 KB (unique body, no shared history); "concurrent" is how many appenders wait for their own receipts at once. Rates are
given per second of wall time and of CPU time of the whole process, since shared machines make the first one wander.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from reef_cli.core.ids import RecordId, new_id
from reef_cli.core.types import Inference, TokenSpan, TokenTrace
from reef_cli.experience.log import ExperienceLog
from reef_cli.experience.writer import Durability

WORDS = [f"{word}{number}" for word in ("reef", "coral", "tide", "polyp", "lagoon", "atoll") for number in range(500)]


def exchange(messages: Sequence[dict[str, Any]], answer: str, extra: dict[str, Any] | None = None) -> Inference:
    """An exchange with a short token trace, as the gateway would hand it over."""
    body = orjson.dumps({"model": "m", "messages": messages, "stream": True, **(extra or {})})
    output = tuple(range(100, 116))
    trace = TokenTrace(tuple(range(32)), output, (-0.5,) * 16, (1,) * 16, (TokenSpan("base", 0, 16),))
    return Inference(
        id=RecordId(new_id()),
        scenario="bench",
        created_at=time.time(),
        dialect="chat",
        model="m",
        request=body,
        messages=list(messages),
        response={"role": "assistant", "content": answer},
        finish="stop",
        tokens=trace,
        usage={"prompt_tokens": 32, "completion_tokens": 16},
        timings={"ttft_s": 0.01, "total_s": 0.2},
    )


def text(generator: random.Random, size: int) -> str:
    return " ".join(generator.choices(WORDS, k=size // 7))[:size]


def rows_of_4kb(count: int) -> list[Inference]:
    generator = random.Random(count)
    return [exchange([{"role": "user", "content": text(generator, 3600)}], text(generator, 200)) for _ in range(count)]


async def rate(folder: Path, durability: Durability, concurrent: int, rows: int) -> dict[str, Any]:
    """Insert `rows` exchanges from `concurrent` appenders; each waits for its own."""
    log = ExperienceLog.open(folder / f"{durability}-{concurrent}.db", durability=durability)
    await log.scenarios.ensure("bench")
    records = iter(rows_of_4kb(rows))
    waits: list[float] = []

    async def appender() -> None:
        for record in records:
            started = time.perf_counter()
            await log.append(record)
            waits.append(time.perf_counter() - started)

    wall, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(appender() for _ in range(concurrent)))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    log.close()
    waits.sort()
    return {
        "durability": durability,
        "concurrent": concurrent,
        "rows": rows,
        "rows_per_s": round(rows / wall),
        "rows_per_cpu_s": round(rows / cpu),
        "p50_ms": round(waits[len(waits) // 2] * 1e3, 3),
        "p99_ms": round(waits[len(waits) * 99 // 100] * 1e3, 3),
    }


async def session(folder: Path, turns: int) -> dict[str, Any]:
    """A conversation of `turns` turns of about 1 KB under a 6 KB prompt with tools: bytes kept, and time per turn."""
    generator = random.Random(turns)
    log = ExperienceLog.open(folder / f"session-{turns}.db")
    await log.scenarios.ensure("bench")
    tools = {
        "tools": [{"type": "function", "function": {"name": f"t{n}", "description": text(generator, 400)}} for n in range(8)]
    }
    messages: list[dict[str, Any]] = [{"role": "system", "content": text(generator, 6000)}]
    naive, times = 0, []
    for _ in range(turns):
        messages.append({"role": "user", "content": text(generator, 600)})
        record = exchange(messages, text(generator, 400), tools)
        naive += len(record.request)
        started = time.perf_counter()
        await log.append(record)
        times.append(time.perf_counter() - started)
        messages.append(dict(record.response or {}))
    stored = log.counts("bench")["stored_bytes"]
    log.close()
    tenth = max(turns // 10, 1)
    return {
        "turns": turns,
        "naive_bytes_per_turn": naive // turns,
        "stored_bytes_per_turn": stored // turns,
        "file_bytes_per_turn": (folder / f"session-{turns}.db").stat().st_size // turns,
        "saving": round(naive / stored, 1),
        "first_tenth_ms": round(sorted(times[:tenth])[tenth // 2] * 1e3, 3),
        "last_tenth_ms": round(sorted(times[-tenth:])[tenth // 2] * 1e3, 3),
    }


def machine() -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "commit": commit,
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


async def measure(rows: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plan: list[tuple[Durability, int, int]] = [
            ("process", 256, rows),
            ("process", 16, rows),
            ("process", 1, rows // 4),
            ("power", 256, rows),
            ("power", 16, rows // 4),
            ("power", 1, rows // 40),
        ]
        inserts = [await rate(folder, *run) for run in plan]
        return {"machine": machine(), "inserts": inserts, "sessions": [await session(folder, 50), await session(folder, 400)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=6000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = json.dumps(asyncio.run(measure(options.rows)), indent=2)
    if options.out:
        options.out.write_text(results + "\n")
    print(results)


if __name__ == "__main__":
    main()
