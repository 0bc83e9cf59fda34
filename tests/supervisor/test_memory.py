"""Memory that a load left free goes back to the system while the server goes on."""

import asyncio

import pytest

from reef_cli.supervisor import memory


async def test_what_was_freed_goes_back_to_the_system() -> None:
    if memory.trimmer() is None:
        pytest.skip("this C library has no way to give memory back")
    tending = asyncio.create_task(memory.tend(0.02))
    await asyncio.sleep(0)
    before = memory.resident()
    # Pieces below the size that is mapped by itself; some stay, so that the heap cannot shrink from its end.
    held = [bytes(100_000) for _ in range(1000)]
    kept = held[::50]
    high = memory.resident()
    held.clear()
    for _ in range(200):
        await asyncio.sleep(0.02)
        if memory.resident() < before + (high - before) // 4:
            break
    tending.cancel()
    assert high - before > 60 << 20
    assert memory.resident() - before < (high - before) // 4
    assert len(kept) == 20
