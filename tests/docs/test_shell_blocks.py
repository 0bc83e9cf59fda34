"""Shell blocks use commands, options and targets that exist."""

import re
import shlex
import sys
from typing import Any

import pytest

from reef_cli.commands.table import BY_NAME
from tests.docs.pages import ROOT, Block, blocks

sys.path.insert(0, str(ROOT / "scripts"))
from docs_pages.cli import application

_KNOWN = {"reef", "make", "curl", "export", "cd", "git", "pip", "python", "source", "sqlite3", "cp"}
_SETTING = re.compile(r"--(reef|engine|trainer|evaluation|storage|telemetry)\.\w+")


def commands(block: Block) -> list[list[str]]:
    """The words of each command; continued lines are joined, comments and pipes cut off."""
    text = block.text.replace("\\\n", " ")
    return [words for line in text.splitlines() if (words := shlex.split(line, comments=True))]


@pytest.mark.parametrize("block", blocks("bash"), ids=str)
def test_commands_exist(block: Block) -> None:
    for words in commands(block):
        assert words[0] in _KNOWN, words[0]
        if words[0] == "reef":
            check_reef(words[1:])
        elif words[0] == "make":
            makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
            for target in words[1:]:
                assert re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE), target
        elif words[0] == "python" and words[1].endswith(".py"):
            assert words[1] == "learn.py" or (ROOT / words[1]).exists(), words[1]
        elif words[:3] == ["python", "-m", "benchmarks"]:
            assert (ROOT / "benchmarks").is_dir()


def check_reef(words: list[str]) -> None:
    """The command, its subcommand, and each option."""
    if words[0].startswith("-"):
        assert words[0] in ("--help", "--version", "--debug"), words[0]
        return
    assert words[0] in BY_NAME, words[0]
    command: Any = application(BY_NAME[words[0]].module)
    rest = words[1:]
    while getattr(command, "commands", None):
        assert rest and rest[0] in command.commands, f"reef {' '.join(words)}"
        command, rest = command.commands[rest[0]], rest[1:]
    known = {option for parameter in command.params for option in parameter.opts} | {"--help", "-h"}
    for word in rest:
        if word.startswith("-") and not re.fullmatch(r"-\d.*", word):
            option = word.partition("=")[0]
            assert option in known or (words[0] == "serve" and _SETTING.fullmatch(option)), f"reef {' '.join(words)}"


def test_settings_in_shell_blocks_exist() -> None:
    from reef_cli.config.keys import key_table

    keys = {f"--{key.dotted}" for key in key_table().values()}
    for block in blocks("bash"):
        for words in commands(block):
            assert {word for word in words if _SETTING.fullmatch(word)} <= keys, str(block)


@pytest.mark.parametrize("wrong", ["reef serv", "reef jobs lst", "reef report R --scor 1", "reef serve --engin.kind x"])
def test_the_check_notices_what_does_not_exist(wrong: str) -> None:
    with pytest.raises(AssertionError):
        check_reef(shlex.split(wrong)[1:])
