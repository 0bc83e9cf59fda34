"""Shared by the harness tests: a fake gateway, a bare environment with its own HOME, a picture of a folder."""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from reef_cli.harness import discovery, install
from reef_cli.harness.tree import Tree
from tests.harness.gateway import FakeGateway


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    with FakeGateway() as server:
        yield server


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / ".profile").write_text("# mine\n")
    return folder


@pytest.fixture
def env(home: Path) -> dict[str, str]:
    return {
        "HOME": str(home),
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "REEF_TOKEN": "real-token",
        "HTTP_PROXY": "http://127.0.0.1:9",
        "http_proxy": "http://127.0.0.1:9",
    }


def picture(folder: Path) -> dict[str, str]:
    """Every path below a folder with its mode and content: equal pictures mean byte-identical folders."""
    found = {}
    for path in sorted(folder.rglob("*")):
        mode = oct(path.lstat().st_mode)
        found[str(path.relative_to(folder))] = (
            mode if path.is_dir() else f"{mode} {hashlib.sha256(path.read_bytes()).hexdigest()}"
        )
    return found


RULES = {"id": "house", "kind": "rules", "config": {"text": "Answer in one short sentence."}}


@pytest.fixture
def payload(gateway: FakeGateway) -> Callable[..., dict[str, Any]]:
    def make(
        adapter: str = "native",
        entries: Any = (RULES,),
        release: str | None = "r1-aaaaaaaa",
        scenario: str = "default",
        **more: Any,
    ) -> dict[str, Any]:
        name, version = discovery.split(adapter)
        facts = install.ReleaseFacts(scenario, release, f"sha256:{release}", 1, **more)
        return install.payload(discovery.adapter(name), Tree.of(entries), facts, install.Target(gateway.url, "m", version))

    return make
