"""What an engine prints: kept without its keys, its fault found among what interpreters print, its log bounded."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from reef_cli.engines import output
from reef_cli.engines.output import Output
from reef_cli.engines.process import end_leftovers


def printed(path: Path, text: str, *secrets: str) -> Output:
    made = Output(path, secrets)
    subprocess.run([sys.executable, "-c", f"print({text!r})"], stdout=made.fd, check=True)
    made.started()
    made.close()
    return made


def test_keys_do_not_reach_the_log(tmp_path: Path) -> None:
    made = printed(tmp_path / "engine.log", "server_args={'api_key': 'sesame', 'x': 1}\nready", "sesame", "other")
    assert (tmp_path / "engine.log").read_text() == "server_args={'api_key': '***', 'x': 1}\nready\n"
    assert "sesame" not in " ".join(made.tail())


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (
            "Traceback\n  File x\nIndexError: index out of range in self\n\nleaked 5 types",
            "IndexError: index out of range in self",
        ),
        (
            "usage: x\nlaunch_server.py: error: unrecognized arguments: --foo",
            "launch_server.py: error: unrecognized arguments: --foo",
        ),
        ("torch.OutOfMemoryError: CUDA out of memory\nkilling", "torch.OutOfMemoryError: CUDA out of memory"),
        ("one\ntwo\n\n", "two"),
        ("", "empty log"),
    ],
)
def test_the_cause_is_the_line_that_names_it(tmp_path: Path, text: str, cause: str) -> None:
    assert printed(tmp_path / "log", text).cause() == cause


def test_a_log_that_has_grown_is_set_aside_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "LIMIT_BYTES", 50)
    printed(tmp_path / "log", "\n".join(f"line {number} of twenty" for number in range(20)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "log.1"]
    assert all(path.stat().st_size < 100 for path in tmp_path.iterdir())


def test_what_an_earlier_engine_left_behind_is_ended_and_nothing_else(tmp_path: Path) -> None:
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    ours, others = tmp_path / "a" / "engine.log", tmp_path / "b" / "engine.log"
    left = subprocess.Popen(sleep, env=os.environ | {"REEF_ENGINE_LOG": str(ours)})
    other = subprocess.Popen(sleep, env=os.environ | {"REEF_ENGINE_LOG": str(others)})
    try:
        deadline = time.monotonic() + 20
        while not (found := end_leftovers(ours)) and time.monotonic() < deadline:
            time.sleep(0.05)  # between fork and exec it still has our environment
        assert found == [left.pid] and left.wait(20) == -9 and other.poll() is None
        assert end_leftovers(ours) == []
    finally:
        left.kill()
        other.kill()
        other.wait()


_PARENT = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, sys.argv[1], str(os.getpid()), sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the death signal is Linux's")
def test_a_guarded_engine_dies_with_the_process_that_started_it() -> None:
    import psutil

    from reef_cli.engines import guard

    parent = subprocess.Popen([sys.executable, "-c", _PARENT, guard.__file__], stdout=subprocess.PIPE, text=True)
    child = psutil.Process(int(parent.stdout.readline()))
    deadline = time.monotonic() + 20
    # Between two programs a process has no command line.
    while "time.sleep" not in (line := " ".join(child.cmdline())) or "guard" in line:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    parent.kill()
    parent.wait()
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_guard_whose_parent_is_gone_starts_nothing() -> None:
    from reef_cli.engines import guard

    done = subprocess.run([sys.executable, guard.__file__, "1", "echo", "started"], capture_output=True, text=True)
    assert done.returncode == 1 and "is gone" in done.stderr and not done.stdout
