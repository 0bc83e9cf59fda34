"""Two commands promote at the same moment: one wins, the other exits 4 and names the head that stands there now."""

import json
import subprocess
from pathlib import Path

import pytest

from reef_cli.core.ids import ContentId
from reef_cli.core.types import Draft, Operation, Surface
from reef_cli.releases.service import ReleaseService
from tests.e2e.server import LIMIT_S, Server, clean_environment, command, serving


def hold(home: Path, adapters: list[Path]) -> list[str]:
    """Held candidates over the present head, as `publish: review` leaves them."""
    service = ReleaseService(home)
    head = service.head("default")
    assert head is not None
    ids = []
    for folder in adapters:
        artifact = service.store(folder, "lora")
        draft = Draft(ContentId(artifact.content_id), "lora", Surface.WEIGHTS, Operation.TRAINING, "test", {"reason": "held"})
        ids.append(str(service.hold("default", draft, head.release_id).release_id))
    return ids


def race(home: Path, ids: list[str], head: str) -> list[subprocess.CompletedProcess[str]]:
    """One process per candidate, all over the same head."""
    words = ["--expected-head", head, "--json", "--yes", "--home", str(home)]
    running = [
        subprocess.Popen(command("release", "promote", id_, *words), stdout=-1, stderr=-1, text=True, env=clean_environment())
        for id_ in ids
    ]
    ended = [(process, *process.communicate(timeout=LIMIT_S)) for process in running]
    return [subprocess.CompletedProcess(p.args, p.returncode, out, err) for p, out, err in ended]


def check(results: list[subprocess.CompletedProcess[str]], head: str) -> str:
    """Exactly one winner; every loser names it. The winner's release."""
    assert sorted(one.returncode for one in results) == [0, *[4] * (len(results) - 1)], [r.stdout + r.stderr for r in results]
    won = json.loads(next(one.stdout for one in results if one.returncode == 0))["release"]
    assert won["operation"] == "promote" and won["parent_release_id"] == head
    for one in results:
        if one.returncode == 4:
            error = json.loads(one.stdout)["error"]
            assert error["code"] == "head_moved" and won["release_id"] in error["message"], error
    return str(won["release_id"])


@pytest.fixture
def server(tiny_model: Path, tmp_path: Path):
    with serving(tmp_path / "h", tiny_model) as running:
        yield running


def test_promotes_race_with_a_server_and_without(server: Server, adapters: list[Path]) -> None:
    head = server.head()
    ids = hold(server.home, adapters[:2])
    assert {row["release_id"] for row in server.releases() if row["pending"]} == set(ids)
    won = check(race(server.home, ids, head), head)
    assert server.head() == won == server.ask("who").headers["x-reef-release-id"]

    again = hold(server.home, adapters[2:4])
    assert server.stop() == 0
    offline = check(race(server.home, again, won), won)
    server.start().ready()
    assert server.head() == offline == server.ask("who").headers["x-reef-release-id"]
    promoted = [row for row in server.releases() if row["operation"] == "promote"]
    assert len(promoted) == 2, "the losers left no release"
