from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.learning.world import World


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = await World(tmp_path).open()
    yield made
    await made.close()
