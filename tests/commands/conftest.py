"""A shell in an empty folder, alone or in front of a fake server."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commands.runner import Reef, shell_at
from tests.control.fake_reef import TOKEN, FakeReef


@pytest.fixture
def server() -> Iterator[FakeReef]:
    fake = FakeReef()
    yield fake
    fake.close()


@pytest.fixture
def shell(tmp_path: Path) -> Reef:
    return shell_at(tmp_path)


@pytest.fixture
def reef(tmp_path: Path, server: FakeReef) -> Reef:
    return shell_at(tmp_path, REEF_URL=server.url, REEF_TOKEN=TOKEN)
