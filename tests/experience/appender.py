"""A child process for the crash tests: appends under load and prints each id once the log said it is durable.

Arguments: database path, durability, number of concurrent appenders, limit of a file's size in bytes (0: none).
"""

import asyncio
import resource
import signal
import sys
from pathlib import Path

import orjson

from reef_cli.core.errors import StorageError
from reef_cli.core.ids import RecordId, new_id
from reef_cli.core.types import Inference, Report
from reef_cli.experience.log import ExperienceLog


def exchange(worker: int, number: int) -> Inference:
    messages = [{"role": "user", "content": f"{worker}/{number} " + "x" * 2000}]
    return Inference(
        id=RecordId(new_id()),
        scenario="s1",
        created_at=float(number),
        dialect="chat",
        model="m",
        request=orjson.dumps({"messages": messages}),
        messages=messages,
        response={"role": "assistant", "content": f"{worker}/{number}"},
    )


async def worker(log: ExperienceLog, index: int) -> None:
    number = 0
    while True:
        number += 1
        record = exchange(index, number)
        try:
            await log.append(record)
        except StorageError:
            print("full", flush=True)
            await asyncio.sleep(0.05)
            continue
        print(f"record {record.id}", flush=True)
        if number % 5 == 0:
            report = Report(RecordId(new_id()), "s1", 0.0, (record.id,), score=1.0)
            try:
                await log.report(report)
            except StorageError:
                continue
            print(f"report {report.id}", flush=True)


async def main() -> None:
    path, durability, workers, limit = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    log = ExperienceLog.open(path, durability=durability)  # type: ignore[arg-type]
    await log.scenarios.ensure("s1")
    if limit:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    await asyncio.gather(*(worker(log, index) for index in range(workers)))


if __name__ == "__main__":
    asyncio.run(main())
