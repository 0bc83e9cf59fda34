"""A gateway over the real log and the real release chain, with small fakes for what has a model or a worker behind it."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.gateway.fakes import House, house


@pytest.fixture
async def reef(tmp_path: Path) -> AsyncIterator[House]:
    """The default deployment."""
    async with house(tmp_path) as made:
        yield made
