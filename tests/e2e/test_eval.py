"""`reef eval` against a real server: a server killed half-way loses no answer, and the second run asks only the rest."""

import asyncio
import json
import os
import pty
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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
        with on_terminal("eval", "--suite", str(suite), **place) as (first, seen):
            until(lambda: re.search(rb"suite.jsonl.*[4-9]/12 answers", seen()), "a bar that moves")
            assert re.search(
                "evaluating\t1 release of default on suite.jsonl, [0-9]+/12 answers", reef("status", **place).stdout
            )
            server.kill()
            assert first.wait(60) != 0
            until(lambda: b"error:" in seen(), "an error after the bar")
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


def test_without_a_model_clients_choose_and_an_evaluation_says_what_it_lacks(
    provider: Upstream, suite: Path, tmp_path: Path
) -> None:
    server = Server(tmp_path / "h", {"engine.kind": "upstream", "engine.url": provider.url})
    with stopped(server):
        server.start().ready()
        place = {"REEF_HOME": str(server.home)}
        assert f"serving the models of {provider.url}" in server.words()
        assert json.loads(reef("status", "--json", **place).stdout)["engine"]["model"] is None
        assert reef("chat", "hello", "--model", "theirs", **place).returncode == 0
        assert provider.seen[-1].body["model"] == "theirs"
        asked = len(provider.seen)
        done = reef("eval", "--suite", str(suite), **place)
        assert done.returncode != 0 and "engine.model" in done.stderr, done.stderr
        assert len(provider.seen) == asked


@contextmanager
def on_terminal(*words: str, **place: str) -> Iterator[tuple[subprocess.Popen[bytes], Callable[[], bytes]]]:
    """A command whose stderr is a terminal, and all it has drawn there so far."""
    main, side = pty.openpty()
    os.set_blocking(main, False)
    drawn = bytearray()

    def seen() -> bytes:
        with suppress(BlockingIOError, OSError):
            while part := os.read(main, 65536):
                drawn.extend(part)
        return bytes(drawn)

    environment = clean_environment(**place, TERM="xterm", COLUMNS="120")
    try:
        with subprocess.Popen(command(*words), env=environment, stdout=subprocess.DEVNULL, stderr=side) as process:
            yield process, seen
    finally:
        os.close(side)
        os.close(main)


def rows(home: Path) -> int:
    files = list((home / "evaluations").glob("*.jsonl"))
    return files[0].read_bytes().count(b"\n") - 1 if files else 0
