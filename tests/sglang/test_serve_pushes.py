"""Pushes of all weights through `reef serve` into a real SGLang: over gloo and from disk, into one and two engines, with
clients that never pause, and with trainer, engine and server killed in the middle.

Candidates are tried in a second engine; a small model of random weights keeps each start short.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from reef_cli.engines import launch
from reef_cli.weights.group import free_port
from tests.crash.gate import gate
from tests.crash.test_kill import quiet
from tests.crash.test_push_kills import FULL, World, cut_off
from tests.e2e.server import SAO, Server, stopped, until
from tests.e2e.test_several_engines import step
from tests.e2e.test_swaps import clients, grown
from tests.engines.live import make_model
from tests.sglang.running import CPU, Running, settings
from tests.sglang.test_serve import settings as served

pytestmark = pytest.mark.timeout(900)
LIMIT_S = 600.0
MANUAL = {**SAO, **FULL, "reef.training_mode": "manual"}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large enough for several buckets of 1 MiB."""
    return make_model(tmp_path_factory.mktemp("wide") / "m", width=8192)


class Alone:
    """A real SGLang that somebody else runs; started again under its address and keys after a death."""

    def __init__(self, model: Path, folder: Path) -> None:
        chosen, log, config = settings("sglang", model, adapters=False), folder / "sglang.log", folder / "config.yaml"
        self._made = launch.sglang(chosen, model, free_port(), log, config, adapters=False)
        self._start()

    def _start(self) -> None:
        self.running = Running("sglang", self._made).wait()

    @property
    def address(self) -> dict[str, str]:
        return {"engine.api_key": self._made.api_key, "engine.admin_key": self._made.admin_key}

    @property
    def url(self) -> str:
        return self._made.url

    @property
    def dead(self) -> bool:
        return self.running.process.poll() is not None

    def kill(self) -> None:
        self.running.kill()

    def again(self) -> None:
        self.running.stop()
        self._start()

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        return self.running.post(path, body).json()

    def label(self) -> str:
        return str(self.running.get("/model_info").json()["weight_version"])

    def checksum(self) -> str:
        return str(self.post("/weights_checker", {"action": "checksum", "selector": "all"})["per_engine_checksum"])

    def stop(self) -> None:
        self.running.stop()


@pytest.fixture(scope="module")
def alone(wide: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Alone]:
    made = Alone(wide, tmp_path_factory.mktemp("alone"))
    yield made
    made.stop()


@contextmanager
def attached(alone: Alone, home: Path, model: Path, url: str, **more: str) -> Iterator[Server]:
    flags = {"engine.kind": "sglang", "engine.url": url, "engine.model": str(model), **alone.address, **MANUAL, **more}
    server = Server(home, flags)
    with stopped(server):
        yield server.start().ready(LIMIT_S)


def released(server: Server) -> str:
    job = step(server)
    assert (job["state"], job["outcome"]) == ("settled", "select"), job
    return str(job["release_id"])


def test_all_weights_reach_two_engines_under_streaming_clients(wide: Path, tmp_path: Path) -> None:
    flags = {"engine.model": str(wide), **MANUAL, **served(**CPU), "engine.replicas": "2"}
    server = Server(tmp_path / "h", flags)
    with stopped(server):
        server.start().ready(LIMIT_S)
        releases = [released(server)]  # the engine for candidates starts now, while nobody waits
        with clients(server) as answers:
            grown(answers)
            releases.append(released(server))
            grown(answers, 16)
        # A gate may have made one more of the first: the stream was quiet for a moment.
        chain = [str(row["release_id"]) for row in reversed(server.releases())]
        assert set(releases) <= {release for _, _, release in answers} <= set(chain)
        order = [f"default@{release}" for release in chain]
        whole: dict[str, set[str]] = {}
        for text, receipt, _ in answers:
            record: dict[str, Any] = server.get(f"/reef/scenarios/default/records/{receipt}")
            spans = [span["version"] for span in record["tokens"]["spans"]]
            assert record["complete"] and [order.index(span) for span in spans] == sorted(order.index(span) for span in spans)
            if len(spans) == 1:
                whole.setdefault(spans[0], set()).add(text)
        assert order[-1] in whole and len(whole) > 1, "before and after the push whole answers were given"
        log = (server.home / "logs" / "reef.log").read_text()
        assert log.count("pushed default@") >= 2
        assert any("sglang_router" in words or "sglang::router" in words for words in server.children().values())


def test_a_checkpoint_is_read_from_disk_by_an_engine_reached_by_its_address(alone: Alone, wide: Path, tmp_path: Path) -> None:
    before = alone.checksum()
    with attached(alone, tmp_path / "h", wide, alone.url, **{"trainer.transport": "disk"}) as server:
        release = released(server)
        assert alone.label() == f"default@{release}" and alone.checksum() != before
        assert server.ask("who").headers["x-reef-weight-version"] == f"default@{release}"
        back = server.client().post("/reef/scenarios/default/rollback", json={})
        assert back.status_code == 200, back.text
        until(lambda: alone.checksum() == before, "the first weights", LIMIT_S)


@pytest.fixture(scope="module")
def lifelong(alone: Alone, wide: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    home, auto = tmp_path_factory.mktemp("home") / "h", {"reef.training_mode": "auto"}
    with gate(alone.url) as door, attached(alone, home, wide, door.url, **auto) as server:
        server.scored(2)
        quiet(server)
        yield World(server, alone, door, wide)


@pytest.mark.parametrize(
    ("point", "victim"),
    [*(("half the buckets", victim) for victim in ("trainer", "engine", "server")), ("version set", "server")],
)
def test_a_push_is_cut_off(lifelong: World, point: str, victim: str) -> None:
    cut_off(lifelong, point, victim)
