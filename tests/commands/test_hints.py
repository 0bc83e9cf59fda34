"""What errors tell people to type exists: each `reef ...` in a message is a command, with the options it has."""

import ast
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import reef_cli
from reef_cli.commands.table import BY_NAME

ROOT = Path(reef_cli.__file__).parent
COMMAND = re.compile(r"\breef ((?:[a-z][a-z-]*)(?: [a-z][a-z-]*)?)((?:[^`;,.)]|\.(?=\w))*)")
TOLD = ("hint", "why")


def messages() -> Iterator[tuple[str, str]]:
    """Where, and the words of every hint and reason that is written down in the code; what is put in is an X."""
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword) and node.arg in TOLD:
                for value in ast.walk(node.value):
                    if isinstance(value, ast.JoinedStr):
                        parts = [part.value if isinstance(part, ast.Constant) else "X" for part in value.values]
                        yield f"{path.name}:{node.value.lineno}", "".join(map(str, parts))
                    elif isinstance(value, ast.Constant) and isinstance(value.value, str):
                        yield f"{path.name}:{node.value.lineno}", value.value


def options(command: Any) -> set[str]:
    return {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}


def told() -> list[tuple[str, str, str]]:
    found = [(where, *match.groups()) for where, text in messages() for match in COMMAND.finditer(text)]
    return [(where, words, rest) for where, words, rest in found if words.split()[0] in BY_NAME or "--" in rest]


def test_hints_that_name_commands_are_found() -> None:
    assert len(told()) > 30


@pytest.mark.parametrize(("where", "words", "rest"), told())
def test_what_a_hint_names_is_there(where: str, words: str, rest: str) -> None:
    name, *more = words.split()
    assert name in BY_NAME, where
    command: Any = get_command(import_module(f"reef_cli.commands.{BY_NAME[name].module}").app)
    if hasattr(command, "commands") and name in command.commands and len(command.commands) == 1:
        command = command.commands[name]
    if hasattr(command, "commands") and more:
        assert more[0] in command.commands, f"{where}: reef {words}"
        command = command.commands[more[0]]
    elif hasattr(command, "commands"):
        return
    for option in re.findall(r"(?<![\w-])--?[a-z][a-z-]*(?![\w.-])", rest):
        assert option in ("-h", *options(command)), f"{where}: reef {words} {option}"
