"""What a load left free of the server's memory goes back to the system.

The C library keeps what was freed between pieces that are still in use. After a burst of requests of 100 KB that is as much as
the server needs for itself, and nothing gives it back but being asked to.
"""

import asyncio
import ctypes
import os
from collections.abc import Callable
from pathlib import Path

EVERY_S = 15.0
_GROWN_BYTES = 4 << 20
"""Growth that makes it worth a look through the heap, which takes a millisecond or two."""


async def tend(every_s: float = EVERY_S) -> None:
    """Until cancelled; ends at once where the C library has no way to give memory back."""
    trim = trimmer()
    least = resident()
    while trim is not None:
        await asyncio.sleep(every_s)
        if resident() > least + _GROWN_BYTES:
            await asyncio.to_thread(trim)
            least = resident()
        least = min(least, resident())


def trimmer() -> Callable[[], None] | None:
    """Gives free memory back to the system; None where it cannot be asked for (glibc can)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return None if trim is None else lambda: trim(0)


def resident() -> int:
    """Bytes of physical memory this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
