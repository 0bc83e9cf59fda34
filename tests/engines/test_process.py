"""The engine as a child: readiness, death noticed and repaired, nothing left behind, no key in its command line."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from reef_cli.config.schema import EngineSettings
from reef_cli.core.errors import EngineUnavailable
from reef_cli.core.ports import Sampling
from reef_cli.engines import launch
from reef_cli.engines.process import EngineProcess, Launch
from tests.engines.live import Live, free_port

SETTINGS = EngineSettings(threads=1, start_timeout_s=90.0)


def embedded(tiny: Path, tmp_path: Path, **changes) -> Launch:
    return replace(launch.embedded(SETTINGS, tiny, free_port(), tmp_path / "engine.log"), **changes)


async def test_start_answer_die_restart_stop(tiny: Path, tmp_path: Path) -> None:
    restarted = asyncio.Event()

    async def refill() -> None:
        restarted.set()

    engine = EngineProcess(embedded(tiny, tmp_path), refill)
    await engine.start()
    try:
        first = engine.pid
        assert engine.ready and (await engine.client.generate([5], Sampling(), max_new_tokens=2)).output_ids
        command = " ".join(psutil.Process(first).cmdline())
        assert engine.launch.api_key not in command and engine.launch.admin_key not in command
        assert engine.launch.api_key not in repr(engine.launch)
        os.kill(first, signal.SIGKILL)
        with pytest.raises(EngineUnavailable):
            await engine.client.generate([5], Sampling(), max_new_tokens=400)
        await asyncio.wait_for(restarted.wait(), 60)
        assert engine.ready and engine.pid != first and engine.restarts == 1
        assert engine.last_death is not None and "killed by signal 9" in engine.last_death
        assert (await engine.client.generate([5], Sampling(), max_new_tokens=2)).output_ids
        last = engine.pid
    finally:
        await engine.stop()
        await engine.stop()
    assert not engine.alive and not psutil.pid_exists(last)


async def test_waiting_for_a_restart_is_bounded(tiny: Path, tmp_path: Path) -> None:
    engine = EngineProcess(embedded(tiny, tmp_path))
    with pytest.raises(EngineUnavailable, match="restarting"):
        await engine.wait_ready(0.1)
    await engine.stop()


async def test_a_failed_start_says_why_in_one_line(tmp_path: Path) -> None:
    engine = EngineProcess(embedded(tmp_path / "no-model", tmp_path))
    with pytest.raises(EngineUnavailable) as caught:
        await engine.start()
    assert "exited with code 1" in caught.value.message and "no-model" in caught.value.message
    assert "\n" not in caught.value.message and not engine.alive
    await engine.stop()


async def test_a_missing_program_and_a_slow_start_are_unavailable(tiny: Path, tmp_path: Path) -> None:
    missing = EngineProcess(embedded(tiny, tmp_path, command=["/nowhere/engine"]))
    with pytest.raises(EngineUnavailable, match="Cannot start"):
        await missing.start()
    await missing.stop()
    slow = EngineProcess(
        embedded(tiny, tmp_path, command=[sys.executable, "-c", "import time; time.sleep(60)"], start_timeout_s=1.0)
    )
    with pytest.raises(EngineUnavailable, match="not ready within 1 s"):
        await slow.start()
    assert not slow.alive
    await slow.stop()


async def test_a_stranger_on_the_port_is_not_taken_for_ours(live: Live, tiny: Path, tmp_path: Path) -> None:
    made = replace(launch.embedded(SETTINGS, tiny, live.port, tmp_path / "log"), start_timeout_s=60)
    engine = EngineProcess(made)
    with pytest.raises(EngineUnavailable) as caught:
        await engine.start()
    assert "in use" in caught.value.message
    await engine.stop()


async def test_a_process_that_ignores_sigterm_is_killed_with_its_children(tmp_path: Path, tiny: Path) -> None:
    code = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "time.sleep(60)']); print(child.pid, flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code]
    engine = EngineProcess(embedded(tiny, tmp_path, command=command, start_timeout_s=3.0, stop_timeout_s=0.5))
    with pytest.raises(EngineUnavailable):
        await engine.start()
    child = int((tmp_path / "engine.log").read_text().split()[0])
    await asyncio.sleep(0.1)
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
    await engine.stop()


_PARENT = """
import subprocess, sys, os, time
command = [sys.executable, "-m", "reef_cli.engines.embedded", "--model-path", sys.argv[1], "--port", sys.argv[2]]
command += ["--threads", "1", "--skip-invariance-check", "--parent-pid", str(os.getpid())]
engine = subprocess.Popen(command, start_new_session=True)
print(engine.pid, flush=True)
time.sleep(120)
"""


@pytest.mark.parametrize("while_loading", [True, False])
def test_the_engine_dies_with_its_parent(tiny: Path, tmp_path: Path, while_loading: bool) -> None:
    port = free_port()
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, str(tiny), str(port)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        child = psutil.Process(int(parent.stdout.readline()))
        if not while_loading:
            waiting = Live.__new__(Live)
            waiting.url, waiting.log, waiting.process = f"http://127.0.0.1:{port}", tmp_path / "log", parent
            waiting.wait()
        parent.kill()
        parent.wait()
        deadline = time.monotonic() + 30
        while child.is_running() and child.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    finally:
        parent.kill()
        if psutil.pid_exists(child.pid):
            child.kill()


async def test_sigterm_ends_an_engine_with_requests_under_way(tiny: Path, tmp_path: Path) -> None:
    engine = EngineProcess(embedded(tiny, tmp_path))
    await engine.start()
    task = asyncio.ensure_future(engine.client.generate([5], Sampling(ignore_eos=True), max_new_tokens=500))
    await asyncio.sleep(0.1)
    started = time.monotonic()
    await engine.stop()
    assert time.monotonic() - started < 12
    await asyncio.gather(task, return_exceptions=True)


def test_sglangs_command_has_every_decisive_flag_and_no_key(tmp_path: Path) -> None:
    settings = EngineSettings(kind="sglang", model="m", sglang={"tp_size": 2, "dtype": "float16", "disable_radix_cache": True})
    made = launch.sglang(settings, tmp_path, 1234, tmp_path / "log", tmp_path / "config.yaml")
    text = " ".join(made.command)
    assert "--tp-size 2" in text and "--dtype float16" in text and "--disable-radix-cache" in text and "--port 1234" in text
    assert "--weight-version base" in text and "--sampling-defaults openai" in text and "--lora-strict-loading" in text
    assert made.api_key not in text and made.admin_key not in text
    assert (tmp_path / "config.yaml").stat().st_mode & 0o777 == 0o600
    assert made.api_key in (tmp_path / "config.yaml").read_text()
