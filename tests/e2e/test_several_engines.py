"""Several engines behind one `reef serve`: conversations are shared out, and new weights reach all of them or none."""

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.crash.gate import gate
from tests.e2e.server import SAO, Server, serving, until
from tests.e2e.test_swaps import clients, grown
from tests.engines.live import Live

pytestmark = pytest.mark.slow
WHOLE = {**SAO, "trainer.push": "merged", "reef.training_mode": "manual"}
LIMIT_S = 240.0


def step(server: Server) -> dict[str, Any]:
    """One learning step to its end."""
    seen = {job["id"] for job in server.ledger.jobs()}
    server.scored(2)
    reply = server.client().post("/reef/scenarios/default/jobs")
    assert reply.status_code in (200, 202), reply.text

    def ended() -> list[dict[str, Any]]:
        return [job for job in server.ledger.jobs() if job["id"] not in seen and job["state"] in ("settled", "failed")]

    return dict(until(ended, "a learning step", LIMIT_S)[0])


@pytest.fixture
def two(tiny_model: Path, tmp_path: Path) -> Iterator[list[Live]]:
    flags = ("--skip-invariance-check", "--incremental-streaming-output")
    engines = [Live(tiny_model, tmp_path / f"engine{number}.log", *flags) for number in range(2)]
    try:
        yield [engine.wait() for engine in engines]
    finally:
        for engine in engines:
            engine.stop()


def test_replicas_share_the_talks_and_get_the_same_weights(tiny_model: Path, tmp_path: Path) -> None:
    with serving(tmp_path / "h", tiny_model, **WHOLE, **{"engine.replicas": "2"}) as server:
        family = server.engine_pids()
        assert len(family) == 2
        first = server.head()
        with clients(server) as answers:
            grown(answers)
            job = step(server)
            assert (job["state"], job["outcome"]) == ("settled", "select"), job
            until(lambda: server.head() == job["release_id"], "the release", LIMIT_S)
            grown(answers, 16)
        # On a slow machine the quiet stream may have been judged meanwhile, which makes a release of its own.
        chain = {row["release_id"] for row in server.releases()}
        assert {first, job["release_id"]} <= {release for _, _, release in answers} <= chain
        spent = {pid: sum(psutil.Process(pid).cpu_times()[:2]) for pid in family}
        assert min(spent.values()) > 0.2 * max(spent.values()), "both engines worked"
        texts = {server.greedy(headers_of(number)) for number in range(2)}
        assert len(texts) == 2 and all(server.greedy(headers_of(0)) in texts for _ in range(3))
        versions = Counter()
        for _, receipt, release in answers:
            record = server.get(f"/reef/scenarios/default/records/{receipt}")
            spans = [span["version"] for span in record["tokens"]["spans"]]
            assert record["complete"] and len(spans) <= len(chain)
            versions.update(spans)
        assert {"base", f"default@{job['release_id']}"} <= set(versions) <= {"base", *(f"default@{one}" for one in chain)}


def headers_of(number: int) -> str:
    return ("the quick brown fox", "seven wizards box")[number]


def test_engines_by_their_addresses_get_a_release_all_or_none(two: list[Live], tiny_model: Path, tmp_path: Path) -> None:
    with gate(two[1].url) as door, by_address(tmp_path / "h", tiny_model, [two[0].url, door.url]) as server:
        job = step(server)
        assert (job["state"], job["outcome"]) == ("settled", "select"), job
        label = f"default@{job['release_id']}"
        assert [version(engine) for engine in two] == [label, label]
        assert len({checksum(engine) for engine in two}) == 1
        held = checksum(two[0])
        door.refuse("/update_weights_from_distributed", 2)  # also when the old weights are sent again
        refused = step(server)
        assert refused["state"] == "failed", refused
        assert server.releases()[0]["operation"] == "rollback"
        assert [checksum(engine) for engine in two] == [held, held], "neither kept what the other refused"
        assert server.ask("who").status_code == 200
        better = step(server)
        assert (better["state"], better["outcome"]) == ("settled", "select"), better
        assert len({checksum(engine) for engine in two}) == 1 and checksum(two[0]) != held


def by_address(home: Path, model: Path, urls: list[str]) -> AbstractContextManager[Server]:
    settings = {"engine.kind": "sglang", "engine.urls": f"[{', '.join(urls)}]", "trainer.transport": "group"}
    return serving(home, model, **WHOLE, **settings)


def version(engine: Live) -> str:
    return str(httpx.get(f"{engine.url}/model_info", timeout=30).json()["weight_version"])


def checksum(engine: Live) -> str:
    return str(engine.post("/weights_checker").json()["per_engine_checksum"])


def test_an_engine_that_stops_answering_a_push_is_named_and_the_other_serves_on(
    two: list[Live], tiny_model: Path, tmp_path: Path
) -> None:
    """One of two takes the call that brings the weights and says nothing more: a bounded failure, nobody's weights change."""
    with gate(two[1].url) as door, by_address(tmp_path / "h", tiny_model, [two[0].url, door.url]) as server:
        held = [checksum(engine) for engine in two]
        door.hold("/update_weights_from_distributed", 1, True)
        refused = step(server)
        assert refused["state"] == "failed" and door.url in refused["reason"], refused
        asked = server.client().post("/v1/chat/completions", json=server.body("who"))
        assert asked.status_code == 200, "the healthy one serves on"
        assert checksum(two[0]) == held[0], "with the weights it had"
        door.open()
        until(lambda: checksum(two[1]) == held[1], "the other one having its old weights again")
        better = step(server)
        assert (better["state"], better["outcome"]) == ("settled", "select"), better
        assert len({checksum(engine) for engine in two}) == 1 and checksum(two[0]) != held[0]
