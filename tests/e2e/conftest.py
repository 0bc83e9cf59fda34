"""Servers over the tiny model or over a provider's double, shared by tests that leave them as they are."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import once
from tests.doubles.background import background_upstream
from tests.doubles.upstream import Upstream
from tests.e2e.server import Server, serving


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Records only; one for the whole file."""
    with serving(tmp_path_factory.mktemp("home") / "h", tiny_model) as running:
        yield running


@pytest.fixture(scope="session")
def double() -> Iterator[Upstream]:
    with background_upstream() as running:
        yield running


@pytest.fixture
def provider(double: Upstream) -> Upstream:
    """The provider behind `front`: answers sensibly until a test tells it otherwise, and has seen nothing yet."""
    double.script, double.text, double.reasoning, double.calls = None, "Hello from the stub.", "", ()
    double.seen.clear()
    return double


@pytest.fixture(scope="session")
def front(double: Upstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server before a provider, without a recipe; each test uses scenarios of its own."""
    settings = {"engine.kind": "upstream", "engine.url": double.url, "reef.training_mode": "manual"}
    with serving(tmp_path_factory.mktemp("front") / "h", Path("stub-model"), **settings) as running:
        yield running


@pytest.fixture(scope="session")
def strict(double: Upstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Before an Anthropic-style provider; the scenario's header is mandatory and scenarios are made by hand."""
    settings = {"engine.kind": "upstream", "engine.url": double.url, "engine.api": "anthropic", "reef.default_scenario": "null"}
    home = tmp_path_factory.mktemp("strict") / "h"
    with serving(home, Path("stub-model"), **settings, **{"reef.implicit_scenarios": "false"}) as running:
        yield running


@pytest.fixture(scope="session")
def adapters(tiny_model: Path, shared_folder: Path) -> list[Path]:
    """Four LoRA adapters that make the tiny model say different things."""
    folders = [shared_folder / f"adapter{number}" for number in range(4)]
    with once(shared_folder / "adapters.made") as first:
        if first:
            from tests.engines.live import make_lora

            for number, folder in enumerate(folders):
                make_lora(folder, tiny_model, seed=20 + number)
    return folders
