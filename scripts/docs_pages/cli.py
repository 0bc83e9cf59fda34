"""`docs/cli.md`: every command with its arguments and options, read from the Typer applications."""

from collections.abc import Iterator
from importlib import import_module
from typing import Any

from docs_pages.markdown import code, table
from reef_cli.commands.help import root_help
from reef_cli.commands.table import COMMANDS

COMMON = ("--json", "--home", "--url", "--token-file", "--help")
HEAD = """# Command line

This page is generated from the commands by `scripts/docs.py`.

```text
{help}```

Data goes to stdout, narration to stderr. Tables are aligned on a terminal and tab-separated when piped. With `--json` a failure
is `{{"error": {{"code", "message", "why"?, "hint"?, "exit_code"}}}}` on stdout; the exit code is the same.

## Common options

{common}
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD.format(help=root_help(), common=table(("option", "environment", "meaning"), _common()))]
    for command in COMMANDS:
        parts.append(f"## reef {command.name}\n")
        parts += [_section(path, found) for path, found in leaves(f"reef {command.name}", application(command.module))]
    return "\n".join(parts)


def application(module: str) -> Any:
    """The click command of a module of `reef_cli.commands`."""
    from typer.main import get_command

    return get_command(import_module(f"reef_cli.commands.{module}").app)


def leaves(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    """`(words, command)` of a command, or of everything below a group."""
    children = getattr(command, "commands", None)
    if not children:
        yield path, command
        return
    for name, child in children.items():
        yield from leaves(f"{path} {name}", child)


def _common() -> Iterator[tuple[str, str, str]]:
    found = {
        option: parameter
        for command in COMMANDS
        for _, leaf in leaves(command.name, application(command.module))
        for parameter in leaf.params
        for option in parameter.opts
        if option in COMMON
    }
    for option in COMMON:
        if option in found:
            yield code(option), code(found[option].envvar or ""), found[option].help
    yield code("--help"), "", "Show help; `-h` works too"


def _section(path: str, command: Any) -> str:
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    words = " ".join([path, *(_argument(argument) for argument in arguments)])
    own = [p for p in command.params if not set(p.opts) & set(COMMON)]
    lines = [f"### `{words}`\n", f"{' '.join((command.help or '').split())}.\n"]
    if own:
        lines.append(table(("argument or option", "default", "environment", "meaning"), [_row(p) for p in own]) + "\n")
    return "\n".join(lines)


def _argument(parameter: Any) -> str:
    name = (parameter.metavar or parameter.name.upper()).strip("[]").removesuffix("...")
    name = f"{name}..." if parameter.nargs == -1 else name
    return name if parameter.required else f"[{name}]"


def _row(parameter: Any) -> tuple[str, str, str, str]:
    if parameter.param_type_name == "argument":
        name = _argument(parameter)
    else:
        name = ", ".join(sorted(parameter.opts, key=len, reverse=True))
    default = "" if parameter.default in (None, False) or isinstance(parameter.default, list | tuple) else parameter.default
    if callable(default):
        default = ""
    return code(name), code(default), code(parameter.envvar or ""), (parameter.help or "").replace("  ", " ")
