"""Python blocks run against a real `reef serve` with a double of a provider behind it."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.docs.pages import ROOT, Block, blocks
from tests.doubles.upstream import upstream

sys.path.insert(0, str(ROOT / "scripts"))
from docs_pages.routes import every_route

PROGRAMS = [block for block in blocks("python") if block.file is None]


@pytest.fixture(scope="module")
def provider() -> Iterator[str]:
    """The double on a thread of its own; gives its address."""
    ready, stop, address = threading.Event(), asyncio.Event(), []
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with upstream() as double:
            address.append(double.url)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(10)
    yield address[0]
    loop.call_soon_threadsafe(stop.set)
    thread.join(10)
    loop.close()


@pytest.fixture(scope="module")
def folder(provider: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working folder in which `reef serve` runs, as on a person's machine."""
    place = tmp_path_factory.mktemp("person")
    words = ["serve", "--reef.port", "0", "--engine.kind", "upstream", "--engine.url", provider, "--engine.model", "stub"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("REEF_")}
    with (place / "serve.out").open("wb") as out:
        server = subprocess.Popen(
            [sys.executable, "-m", "reef_cli", *words], cwd=place, env=environment, stdout=out, stderr=out
        )
    try:
        deadline = time.monotonic() + 60
        while "reef: serving" not in (place / "serve.out").read_text():
            assert server.poll() is None and time.monotonic() < deadline, (place / "serve.out").read_text()
            time.sleep(0.1)
        yield place
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


@pytest.mark.parametrize("block", PROGRAMS, ids=str)
def test_it_runs(block: Block, folder: Path) -> None:
    url = json.loads((folder / ".reef" / "run" / "serve.json").read_text())["url"]
    code = block.text.replace("http://127.0.0.1:8900", url)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("REEF_")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "no_recipe" in done.stdout


def test_every_route_of_the_page_is_mounted(folder: Path) -> None:
    """Asked for a scenario that does not exist, a route says anything but that there is no such path."""
    url = json.loads((folder / ".reef" / "run" / "serve.json").read_text())["url"]
    token = (folder / ".reef" / "token").read_text().split()[0]
    headers = {"authorization": f"Bearer {token}", "x-reef-scenario": "nobody"}
    for method, path, _ in every_route():
        if path == "/reef/events":
            path += "?after=0.0.0&limit=1"
        try:
            answer = httpx.request(method, url + re.sub(r"\{\w+\}", "nobody", path), headers=headers, timeout=10)
        except httpx.ReadTimeout:
            continue  # an event stream with nothing to say
        assert "no such path" not in answer.text and answer.status_code != 405, f"{method} {path}: {answer.text}"
    gone = httpx.get(f"{url}/reef/nothing", headers=headers)
    assert "no such path" in gone.text


def test_there_are_programs_to_run() -> None:
    assert {block.page.name for block in PROGRAMS} >= {"README.md", "quickstart.md"}
