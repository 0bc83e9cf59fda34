"""Fixtures over a tiny random model and real engine processes serving it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.live import Live, make_lora, make_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same shape, other weights."""
    return make_model(tmp_path_factory.mktemp("other"), seed=1)


@pytest.fixture(scope="session")
def lora(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_lora(tmp_path_factory.mktemp("lora"), tiny)


@pytest.fixture(scope="session")
def lora2(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_lora(tmp_path_factory.mktemp("lora2"), tiny, seed=6, rank=2)


@pytest.fixture(scope="session")
def live(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """One engine shared by tests that leave no trace in it."""
    engine = Live(tiny, tmp_path_factory.mktemp("live") / "log").wait()
    yield engine
    engine.stop()


@pytest.fixture
def own(tiny: Path, tmp_path: Path) -> Iterator[Live]:
    """An engine of the test's own, for tests that change its weights or kill it."""
    engine = Live(tiny, tmp_path / "log").wait()
    yield engine
    engine.stop()
