"""Python blocks run against a real `reef serve` with a double of a provider behind it."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import Block, blocks
from tests.doubles.upstream import upstream

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


def test_there_are_programs_to_run() -> None:
    assert {block.page.name for block in PROGRAMS} >= {"README.md", "quickstart.md"}
