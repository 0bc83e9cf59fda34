"""Servers over the tiny model, shared by tests that leave them as they are."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.server import Server, serving


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Records only; one for the whole file."""
    with serving(tmp_path_factory.mktemp("home") / "h", tiny_model) as running:
        yield running
