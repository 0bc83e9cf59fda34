"""A gateway over the real log and the real release chain, with small fakes for what has a model or a worker behind it."""

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import uvloop

from tests.gateway.fakes import House, house
from tests.gateway.fuzzing import Tally


@pytest.fixture(scope="session")
def event_loop_policy() -> uvloop.EventLoopPolicy:
    """The event loop that `reef serve` runs on."""
    return uvloop.EventLoopPolicy()


@pytest.fixture
async def reef(tmp_path: Path) -> AsyncIterator[House]:
    """The default deployment."""
    async with house(tmp_path) as made:
        yield made


@pytest.fixture(scope="session")
def tally() -> Iterator[Tally]:
    """Counts what the fuzz tests send; written to `REEF_FUZZ_OUT` where that is set."""
    counts = Tally()
    yield counts
    if out := os.environ.get("REEF_FUZZ_OUT"):
        counts.write(Path(out))
