"""Tests against a real SGLang on the CPU; `make test-sglang` runs them. Without its environment nothing here is collected."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sglang.running import VARIABLE, Running, running

if VARIABLE not in os.environ:
    collect_ignore_glob = ["test_*.py"]

KINDS = ("embedded", "sglang")


@pytest.fixture(scope="session")
def pair(language_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Running]]:
    """Both engines over the same language model, for tests that leave no trace in them."""
    folder = tmp_path_factory.mktemp("pair")
    with running("sglang", language_model, folder) as real, running("embedded", language_model, folder) as embedded:
        yield {"embedded": embedded, "sglang": real}


@pytest.fixture(params=KINDS)
def engine(request: pytest.FixtureRequest, pair: dict[str, Running]) -> Running:
    """The same test over each engine."""
    return pair[request.param]
