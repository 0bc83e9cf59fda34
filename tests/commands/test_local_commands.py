"""Commands that need no server: configuration, recipes, doctor, paths, serve's edge, stop."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from reef_cli.control.discovery import Running
from tests.commands.runner import Reef, shell_at

TOY = '''
from dataclasses import dataclass
from reef_cli.learning.contract import RecipeSettings


@dataclass(frozen=True, slots=True)
class MineSettings(RecipeSettings):
    """Settings."""

    rate: float = 0.5
    """How fast."""


class MineRecipe:
    """Learns from me."""

    name = "mine"
    title = "My own method"
    settings_type = MineSettings

    def __init__(self, settings):
        self.settings = settings
'''


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    folder = tmp_path / "recipes" / "mine"
    folder.mkdir(parents=True)
    (folder / "recipe.py").write_text(TOY)
    broken = tmp_path / "recipes" / "broken"
    broken.mkdir()
    (broken / "recipe.py").write_text("raise RuntimeError('no')")
    return folder


def test_a_persons_own_recipe_stands_beside_the_shipped_ones(shell: Reef, mine: Path) -> None:
    found = {recipe["name"]: recipe for recipe in shell("recipe", "list", "--json").json["recipes"]}
    assert found["mine"]["path"] == "recipes.mine.recipe:MineRecipe"
    assert "RuntimeError: no" in found["broken"]["error"] or found["broken"]["error"]
    shown = shell("recipe", "show", "mine", "--json").json
    assert {"name": "rate", "type": "a number", "required": False, "default": 0.5, "doc": "How fast."} in shown["settings"]
    assert "batch_size" in [setting["name"] for setting in shown["settings"]]
    assert shell("recipe", "show", "nothing").code == 3
    done = shell("serve", "--reef.recipe", "recipes.mine.recipe:MineRecipe", "--reef.rate", "0.25", "--print-config")
    assert "rate: 0.25  # --reef.rate" in done.out


def test_print_config_of_yours_not_of_another_folder(shell: Reef, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("reef:\n  port: 4444\n  token: ${TOK}\n")
    done = shell(
        "serve", "-c", "./x.yaml", "--print-config", "--engine.model=m", env={"TOK": "hunter2", "REEF_ENGINE__THREADS": "2"}
    )
    assert done.code == 0, done.err
    assert "port: 4444  # x.yaml:2" in done.out
    assert "model: m  # --engine.model" in done.out
    assert "threads: 2  # REEF_ENGINE__THREADS" in done.out
    assert "hunter2" not in done.out
    rows = shell("serve", "--print-config", "--json", "--home", "h").json["config"]
    assert {"key": "reef.home", "value": str(tmp_path / "h"), "origin": "--reef.home"} in rows


def test_a_missing_file_is_2_and_named(shell: Reef) -> None:
    done = shell("serve", "-c", "x.yaml")
    assert done.code == 2
    assert done.err.splitlines()[0] == "error: no config file x.yaml"


def test_malformed_yaml_is_three_lines_with_the_place(shell: Reef, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("reef:\n  port: [1\nengine:\n")
    done = shell("serve", "-c", "x.yaml")
    assert done.code == 2
    assert len(done.err.splitlines()) == 3
    assert "x.yaml:3:7" in done.err


def test_a_token_among_the_arguments_is_warned_of_and_not_shown(shell: Reef) -> None:
    done = shell("serve", "--print-config", "--reef.token", "hunter2")
    assert "shows in process listings" in done.err
    assert "hunter2" not in done.out + done.err


def test_config_check_lists_every_problem(shell: Reef, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("reef:\n  prot: 1\nengine:\n  kind: nope\n")
    done = shell("config", "check", "x.yaml")
    assert done.code == 2
    assert len(done.out.splitlines()) == 2
    assert "2 problems in x.yaml" in done.err
    assert len(shell("config", "check", "x.yaml", "--json").json["problems"]) == 2
    (tmp_path / "x.yaml").write_text("reef:\n  port: 1\n")
    assert shell("config", "check", "x.yaml").out == "x.yaml is sound\n"
    assert shell("config", "check", "absent.yaml").code == 2


def test_config_show_and_schema(shell: Reef) -> None:
    done = shell("config", "show", "--origin", "--changed", "--reef.port", "1")
    assert done.out == "reef.port\t1\t--reef.port\n"
    assert json.loads(shell("config", "schema").out)["title"] == "Reef serve.yaml"


def test_paths(shell: Reef, tmp_path: Path) -> None:
    places = shell("paths", "--json", env={"REEF_CACHE": "/somewhere"}).json
    assert places["experience"] == str(tmp_path / ".reef" / "experience.db")
    assert places["cache"] == "/somewhere"
    assert not (tmp_path / ".reef").exists()


def test_doctor_finds_what_others_can_read_and_how_to_close_it(shell: Reef, tmp_path: Path) -> None:
    home = tmp_path / ".reef"
    home.mkdir(mode=0o755)
    home.chmod(0o755)
    (home / "token").write_text("t")
    (home / "token").chmod(0o644)
    done = shell("doctor", "--json")
    assert done.code == 1
    checks = {check["check"]: check for check in done.json["checks"]}
    assert checks["token"]["fix"] == f"chmod 600 {home / 'token'}"
    assert checks["home"]["status"] == "fail"
    assert checks["git"]["status"] == "ok"
    for check in done.json["checks"]:
        assert check["status"] == "ok" or check["fix"], check
    home.chmod(0o700)
    (home / "token").chmod(0o600)
    checks = {check["check"]: check for check in shell("doctor", "--json").json["checks"]}
    assert checks["token"]["status"] == checks["home"]["status"] == "ok"


def test_doctor_without_git_fails_and_says_so(tmp_path: Path) -> None:
    shell = shell_at(tmp_path)
    shell.env["PATH"] = str(tmp_path)
    checks = {check["check"]: check for check in shell("doctor", "--json").json["checks"]}
    assert checks["git"]["status"] == "fail"
    assert "content-addressed store" in checks["git-lfs"]["detail"]


def test_doctor_names_gpus_and_what_can_use_them(tmp_path: Path) -> None:
    shell = shell_at(tmp_path)
    tools = {"nvidia-smi": 'case "$1" in *driver*) echo 570.86;; *) echo "NVIDIA H, 143771";; esac', "other-python": "exit 1"}
    for name, body in tools.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    shell.env["PATH"] = f"{tmp_path}:/usr/bin:/bin"
    shell.env["REEF_ENGINE__PYTHON"] = str(tmp_path / "other-python")
    checks = {check["check"]: check for check in shell("doctor", "--json").json["checks"]}
    assert checks["gpu"]["detail"] == "NVIDIA H, 140.4 GiB; driver 570.86"
    assert checks["gpu engine"]["status"] == "warn"
    assert "engine.python" in checks["gpu engine"]["fix"]
    assert checks["gpu trainer"]["detail"].startswith("torch")


SERVER = """
import signal, sys, time
count = 0
def hear(*_):
    global count
    count += 1
    if count >= {needed}: sys.exit(0)
signal.signal(signal.SIGTERM, hear)
print("up", flush=True)
while True: time.sleep(0.05)
"""


@pytest.mark.parametrize(("needed", "words", "code"), [(1, [], 0), (2, ["--timeout-s", "0.3"], 1), (1, ["--json"], 0)])
def test_stop_waits_until_the_server_is_gone(shell: Reef, tmp_path: Path, needed: int, words: list[str], code: int) -> None:
    process = subprocess.Popen([sys.executable, "-c", SERVER.format(needed=needed)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        Running("http://127.0.0.1:1", process.pid, "i").write(tmp_path / ".reef" / "run" / "serve.json")
        done = shell("stop", *words)
        assert done.code == code, done
        assert (process.poll() is None) == (code == 1)
        if code:
            assert "--force" in done.err
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_stop_without_a_server_is_6(shell: Reef) -> None:
    assert shell("stop").code == 6
