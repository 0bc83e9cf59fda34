"""How commands fail: three lines, a JSON envelope, the exit codes of the house, bugs with their traceback kept."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from reef_cli.commands import dispatch, failure
from reef_cli.core.errors import (
    AuthError,
    ConflictError,
    GateRefused,
    NotFoundError,
    ReefError,
    UnavailableError,
    UsageError,
)
from tests.commands.runner import Reef
from tests.control.fake_reef import FakeReef


@pytest.mark.parametrize(
    ("cls", "code"),
    [
        (ReefError, 1),
        (UsageError, 2),
        (NotFoundError, 3),
        (ConflictError, 4),
        (GateRefused, 5),
        (UnavailableError, 6),
        (AuthError, 7),
    ],
)
def test_exit_codes_and_three_lines(cls: type[ReefError], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert failure.show(cls("what\nhappened", why="why", hint="fix \x1b[2Jit"), as_json=False) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "error: what happened\n  why: why\n  fix: fix it\n"


def test_not_running_is_6_in_words_and_in_json(shell: Reef) -> None:
    done = shell("status")
    assert done.code == 6
    assert done.out == ""
    assert [line[:6] for line in done.err.splitlines()] == ["error:", "  why:", "  fix:"]
    done = shell("status", "--json")
    assert done.code == 6
    assert done.err == ""
    assert done.json["error"]["code"] == "not_running"
    assert done.json["error"]["exit_code"] == 6


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["serv"], "did you mean: reef serve"),
        (["status", "--jsn"], "no such option"),
        (["report"], "missing argument"),
        (["report", "x"], "a report needs a signal"),
        (["report", "x", "--score", "nan"], "must be a finite number"),
        (["report", "x", "--score", "many"], "invalid value for '--score'"),
        (["records", "nonsense"], "nonsense"),
        (["serve", "stray"], "unexpected argument 'stray'"),
        (["completion", "powershell"], "powershell"),
        (["--url"], "there is no command"),
    ],
)
def test_wrong_use_is_2_in_the_same_form(shell: Reef, words: list[str], says: str) -> None:
    done = shell(*words)
    assert done.code == 2, done
    assert says in done.err.lower() or says in done.err
    assert done.err.startswith("error: ")
    assert "Traceback" not in done.err
    assert len(done.err.splitlines()) <= 3


def test_a_group_without_a_command_shows_its_help_and_is_2(shell: Reef) -> None:
    done = shell("release")
    assert done.code == 2
    assert "promote" in done.out


def test_a_wrong_token_is_7(reef: Reef) -> None:
    done = reef("status", env={"REEF_TOKEN": "wrong"})
    assert done.code == 7
    assert "REEF_TOKEN" in done.err


def test_not_found_is_3_and_conflict_is_4(reef: Reef) -> None:
    assert reef("records", "list", "-s", "nobody").code == 3
    assert reef("release", "promote", "r1-bbbbbbbb").code == 4


def test_a_bug_keeps_its_traceback_in_the_home_and_prints_only_the_path(shell: Reef, server: FakeReef, tmp_path: Path) -> None:
    (tmp_path / ".reef" / "logs").mkdir(parents=True)
    server.overrides["GET", "/reef/status"] = lambda *_: (200, {"scenarios": [{"rewards": {"a": 1}}]})
    env = {"REEF_URL": server.url, "REEF_TOKEN": "fake-token"}
    done = shell("status", env=env)
    assert done.code == 1
    assert "Traceback" not in done.err
    log = Path(done.err.splitlines()[-1].partition("traceback: ")[2])
    assert log.parent == tmp_path / ".reef" / "logs"
    assert "Traceback" in log.read_text()
    assert log.stat().st_mode & 0o777 == 0o600
    assert "Traceback" in shell("status", "--debug", env=env).err


def test_without_a_home_the_traceback_goes_to_the_state_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("REEF_HOME", raising=False)

    def broken(_: object) -> int:
        raise RuntimeError("boom")

    monkeypatch.setattr(dispatch, "_run", broken)
    assert dispatch.run(["status", "--json"]) == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["why"] == "RuntimeError: boom"
    assert Path(error["hint"].partition(": ")[2]).parent == tmp_path / "state" / "reef"
    assert not (tmp_path / ".reef").exists()


def test_interrupted_is_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(dispatch, "_run", interrupted)
    assert dispatch.run(["status"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_reader_that_leaves_is_no_error(reef: Reef) -> None:
    command = f"{sys.executable} -m reef_cli records list -n 1000 --json | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=reef.cwd, env=reef.env, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[0] == "{"
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr
