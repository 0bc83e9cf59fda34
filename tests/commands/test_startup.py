"""The first screen and what it costs: CPU and imports."""

import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from reef_cli.commands.completion import SCRIPTS, ShellName, candidates
from reef_cli.commands.help import checkout_commit
from reef_cli.commands.table import BY_NAME, COMMANDS
from tests.commands.runner import Reef

HEAVY = {
    "numpy",
    "aiohttp",
    "textual",
    "httpx",
    "torch",
    "git",
    "orjson",
    "transformers",
    "deepspeed",
    "pydantic",
    "yaml",
    "asyncio",
}


def imported(*words: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "reef_cli", *words], capture_output=True, text=True, timeout=60, check=False
    )
    names = re.findall(r"\|\s+(\S+)$", done.stderr, re.MULTILINE)
    assert "reef_cli.commands.dispatch" in names
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("words", [["--help"], ["--version"]])
def test_help_and_version_import_nothing_heavy_not_even_typer(words: list[str]) -> None:
    assert imported(*words) & (HEAVY | {"typer", "rich", "click"}) == set()


@pytest.mark.parametrize("words", [["status"], ["release", "list"], ["report", "x", "--score", "1"], ["paths"], ["stop"]])
def test_commands_that_talk_to_a_server_stay_light(words: list[str], tmp_path: Path) -> None:
    # Newer versions of Typer import pydantic themselves.
    assert imported(*words, "--home", str(tmp_path)) & (HEAVY - {"pydantic", "asyncio"}) == set()


def cpu_seconds(*words: str) -> float:
    before = os.times()
    subprocess.run([sys.executable, "-m", "reef_cli", *words], capture_output=True, timeout=60, check=False)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def test_help_answers_within_150_ms_of_cpu() -> None:
    assert min(cpu_seconds("--help") for _ in range(5)) <= 0.150


def test_help_says_what_examples_and_every_command_by_task(shell: Reef) -> None:
    for words in ((), ("--help",), ("-h",)):
        done = shell(*words)
        assert done.code == 0
    assert done.out.count("  reef ") == 3
    for command in COMMANDS:
        assert re.search(rf"^  {command.name} +{re.escape(command.help)}$", done.out, re.MULTILINE)
    assert [line for line in done.out.splitlines() if line in ("Serve:", "Look:", "Teach:", "Release:", "Build:")] == [
        "Serve:", "Look:", "Teach:", "Release:", "Build:",
    ]  # fmt: skip
    assert max(map(len, done.out.splitlines())) <= 120


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_every_command_exists_and_explains_itself(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from typer.main import get_command

    from reef_cli.commands.dispatch import run

    assert run([name, "--help"]) == 0
    assert f"Usage: reef {name}" in capsys.readouterr().out
    command = get_command(import_module(f"reef_cli.commands.{BY_NAME[name].module}").app)
    leaves = getattr(command, "commands", {"": command})
    for leaf in leaves.values():
        options = {option for parameter in leaf.params for option in parameter.opts}
        assert "--json" in options, (name, leaf.name)
        assert leaf.help, (name, leaf.name)
        assert not leaf.help.rstrip().endswith("."), leaf.help
        for parameter in leaf.params:
            assert getattr(parameter, "help", "") or parameter.name == "help", (name, leaf.name, parameter.name)


def test_version_names_commit_and_python(shell: Reef) -> None:
    done = shell("--version")
    assert re.fullmatch(r"reef \d+\.\d+\.\d+ \((commit [0-9a-f]{8}, )?python 3\.\d+\.\d+\)\n", done.out)


def test_the_commit_of_a_checkout_is_read_from_its_files(tmp_path: Path) -> None:
    assert checkout_commit(tmp_path) is None
    run = ["git", "-c", "user.name=n", "-c", "user.email=e", "-C", str(tmp_path)]
    subprocess.run([*run, "init", "-q"], check=True)
    subprocess.run([*run, "commit", "-q", "--allow-empty", "-m", "m"], check=True)
    expected = subprocess.run([*run, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert checkout_commit(tmp_path) == expected
    subprocess.run([*run, "pack-refs", "--all"], check=True)
    assert checkout_commit(tmp_path) == expected
    subprocess.run([*run, "worktree", "add", "-q", str(tmp_path / "tree")], check=True)
    assert checkout_commit(tmp_path / "tree") == expected
    subprocess.run([*run, "checkout", "-q", "--detach"], check=True)
    assert checkout_commit(tmp_path) == expected


def test_completion_of_commands_subcommands_and_options() -> None:
    assert [name for name, _ in candidates(["re"])] == ["records", "report", "release", "recipe"]
    assert ("promote", "Serve a held release") in candidates(["release", ""])
    assert "--expected-head" in [name for name, _ in candidates(["release", "promote", "--e"])]
    assert candidates(["nonsense", ""]) == []
    assert len(candidates([""])) == len(COMMANDS)


def test_completion_scripts_are_valid_and_ask_reef(shell: Reef, tmp_path: Path) -> None:
    script = shell("completion", "bash").out
    assert script == SCRIPTS[ShellName.BASH]
    (tmp_path / "reef").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m reef_cli "$@"\n')
    (tmp_path / "reef").chmod(0o755)
    ask = (
        script
        + 'COMP_WORDS=(reef release pro); COMP_CWORD=2; COMP_LINE="reef release pro"; _reef_completion; echo "${COMPREPLY[@]}"'
    )
    env = {**shell.env, "PATH": f"{tmp_path}:{shell.env['PATH']}"}
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, env=env, cwd=tmp_path, check=False)
    assert done.stdout.strip() == "promote"
