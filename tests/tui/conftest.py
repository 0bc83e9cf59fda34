"""A fake server per test."""

from collections.abc import Iterator

import pytest

from tests.control.fake_reef import FakeReef


@pytest.fixture
def reef() -> Iterator[FakeReef]:
    server = FakeReef()
    yield server
    server.close()
