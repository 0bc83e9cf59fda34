"""Finding the live server of a home, and not being fooled by what it left behind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from reef_cli.control.discovery import Running, alive, find_live, read_running, read_token


@pytest.fixture
def announced(tmp_path: Path) -> Path:
    path = tmp_path / "run" / "serve.json"
    Running("http://127.0.0.1:1", os.getpid(), "i1", str(tmp_path / "tok")).write(path)
    return path


def test_a_live_server_is_found_and_its_file_is_private(announced: Path) -> None:
    assert find_live(announced) == read_running(announced)
    assert announced.stat().st_mode & 0o777 == 0o600
    assert list(announced.parent.iterdir()) == [announced]


def test_a_dead_process_is_not_a_server(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    process.wait()
    path = tmp_path / "serve.json"
    Running("http://127.0.0.1:1", process.pid, "i").write(path)
    assert find_live(path) is None
    assert read_running(path) is not None


def test_a_zombie_is_not_a_server(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "print('up')"], stdout=subprocess.PIPE)
    path = tmp_path / "serve.json"
    Running("http://127.0.0.1:1", process.pid, "i").write(path)
    assert process.stdout is not None
    process.stdout.read()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it has ended and nobody has collected it
    assert not alive(process.pid, path)
    process.stdout.close()
    process.wait()


def test_a_pid_given_to_a_younger_process_is_not_a_server(announced: Path) -> None:
    old = announced.stat().st_mtime - 10**6
    os.utime(announced, (old, old))
    assert find_live(announced) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"url": "x"}', '{"url": "x", "pid": "many"}'])
def test_damaged_files_are_no_server(tmp_path: Path, text: str) -> None:
    path = tmp_path / "serve.json"
    path.write_text(text)
    assert read_running(path) is None
    assert find_live(tmp_path / "absent.json") is None


def test_the_token_comes_from_flag_then_environment_then_server_then_home(tmp_path: Path) -> None:
    flag, server, home = tmp_path / "flag", tmp_path / "server", tmp_path / "home"
    for path in (flag, server, home):
        path.write_text(f" {path.name}\n")
    running = Running("u", 1, "i", str(server))
    assert read_token({"REEF_TOKEN": "env"}, flag, running, home) == "flag"
    assert read_token({"REEF_TOKEN": "env"}, None, running, home) == "env"
    assert read_token({"REEF_TOKEN": " "}, None, running, home) == "server"
    assert read_token({}, None, None, home) == "home"
    assert read_token({}, None, None, tmp_path / "absent") is None
