"""`reef eval` against a real server: a server killed half-way loses no answer, and the second run asks only the rest."""

import asyncio
import json
import subprocess
from pathlib import Path

import pytest
from aiohttp import web

from tests.doubles.upstream import Upstream
from tests.e2e.server import Server, clean_environment, command, reef, stopped, until

ITEMS = 12


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    row = {"grader": {"kind": "contains", "value": "stub"}}
    lines = ({"id": f"q{n}", "messages": [{"role": "user", "content": f"question {n}"}], **row} for n in range(ITEMS))
    path = tmp_path / "suite.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_an_evaluation_goes_on_after_the_server_was_killed(provider: Upstream, suite: Path, tmp_path: Path) -> None:
    async def slowly(request: web.Request, raw: bytes) -> web.StreamResponse:
        await asyncio.sleep(0.2)
        return await provider._answer(request, raw)

    provider.script = slowly
    settings = {
        "engine.kind": "upstream",
        "engine.url": provider.url,
        "evaluation.concurrency": "1",
        "engine.model": "stub-model",
    }
    server = Server(tmp_path / "h", settings)
    words = ("eval", "--suite", str(suite), "--json")
    with stopped(server):
        server.start().ready()
        place = {"REEF_HOME": str(server.home)}
        with subprocess.Popen(
            command(*words), env=clean_environment(**place), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as first:
            until(lambda: rows(server.home) >= 4, "four answers")
            server.kill()
            assert first.wait(60) != 0
        kept = rows(server.home)
        assert 4 <= kept < ITEMS
        provider.script = None
        provider.seen.clear()
        server.start().ready()
        done = reef(*words, **place)
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)
        assert (answer["items"], answer["missing"], answer["score"]) == (ITEMS, 0, 1.0)
        asked = [seen for seen in provider.seen if seen.method == "POST"]
        assert len(asked) == answer["spent"]["calls"] == ITEMS - kept
        assert answer["releases"][0]["prompt_tokens"] == 100 * ITEMS, "what the provider counted"
        shown = reef("eval", "--suite", str(suite), **place).stdout
        assert shown.startswith(f"{server.head()}\t1.000\t")


def rows(home: Path) -> int:
    files = list((home / "evaluations").glob("*.jsonl"))
    return files[0].read_bytes().count(b"\n") - 1 if files else 0
