"""Memory that a load left free goes back to the system while the server goes on."""

import subprocess
import sys

import pytest

from reef_cli.supervisor import memory

LOAD = """
import asyncio
from reef_cli.supervisor import memory

async def main():
    tending = asyncio.create_task(memory.tend(0.02))
    await asyncio.sleep(0)
    before = memory.resident()
    # Pieces below the size that is mapped by itself; some stay, so that the heap cannot shrink from its end.
    held = [bytes(100_000) for _ in range(1000)]
    kept = held[::50]
    high = memory.resident()
    held.clear()
    for _ in range(500):
        await asyncio.sleep(0.02)
        if memory.resident() < before + (high - before) // 4:
            break
    tending.cancel()
    print(high - before, memory.resident() - before, len(kept))

asyncio.run(main())
"""
"""In a process of its own: the heap of one that ran other tests has room for all of it."""


def test_what_was_freed_goes_back_to_the_system() -> None:
    if memory.trimmer() is None:
        pytest.skip("this C library has no way to give memory back")
    done = subprocess.run([sys.executable, "-c", LOAD], capture_output=True, text=True, check=True, timeout=60)
    grown, left, kept = map(int, done.stdout.split())
    assert grown > 60 << 20 and left < grown // 4 and kept == 20
