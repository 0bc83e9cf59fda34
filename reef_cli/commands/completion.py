"""`reef completion`: scripts for bash, zsh and fish, and the answers they ask for.

Completing the first word reads the table only; completing inside a command imports that command alone.
"""

import os
from enum import StrEnum
from typing import Annotated, Any

import typer

from reef_cli.commands.shell import Shell, new_app, with_shell
from reef_cli.commands.table import BY_NAME, COMMANDS
from reef_cli.core.errors import UsageError

app = new_app()

_BASH = """\
_reef_completion() {
    local IFS=$'\\n'
    COMPREPLY=($(COMP_WORDS="${COMP_WORDS[*]}" COMP_LINE="$COMP_LINE" COMP_CWORD=$COMP_CWORD _REEF_COMPLETE=words \\
        reef -- "${COMP_WORDS[@]:1:$COMP_CWORD}" 2>/dev/null | cut -f1))
    [ ${#COMPREPLY[@]} -eq 0 ] && compopt -o default
}
complete -F _reef_completion reef
"""
_ZSH = """\
#compdef reef
_reef() {
    local -a found
    local line
    for line in "${(@f)$(_REEF_COMPLETE=words reef -- "${(@)words[2,$CURRENT]}" 2>/dev/null)}"; do
        [[ -n "$line" ]] && found+=("${line/$'\\t'/:}")
    done
    if (( ${#found} )); then _describe 'reef' found; else _files; fi
}
if [[ "${funcstack[1]}" == "_reef" ]]; then _reef "$@"; else compdef _reef reef; fi
"""
_FISH = """\
function __reef_complete
    set -l words (commandline -opc)[2..-1] (commandline -ct)
    _REEF_COMPLETE=words reef -- $words 2>/dev/null
end
complete -c reef -f -a '(__reef_complete)'
"""


class ShellName(StrEnum):
    """Shells with a script."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


SCRIPTS = {ShellName.BASH: _BASH, ShellName.ZSH: _ZSH, ShellName.FISH: _FISH}


@app.command()
@with_shell(local=True)
def completion(shell: Shell, name: Annotated[ShellName, typer.Argument(metavar="SHELL", help="bash, zsh or fish")]) -> None:
    """Print the completion script of a shell; for bash: eval "$(reef completion bash)" """
    shell.emit({"shell": name.value, "script": SCRIPTS[name]}, lambda: print(SCRIPTS[name], end=""))


def complete() -> int:
    """Answer a script: one candidate a line, a tab, its help. The words to complete follow `--` on the command line."""
    import sys

    words = sys.argv[sys.argv.index("--") + 1 :] if "--" in sys.argv else []
    if os.environ.get("_REEF_COMPLETE") != "words":
        raise UsageError("unknown completion request", hint="make the script anew: reef completion bash")
    for name, text in candidates(words):
        print(f"{name}\t{text}")
    return 0


def candidates(words: list[str]) -> list[tuple[str, str]]:
    """What may follow `words`, whose last one is still being typed (empty: a new word)."""
    *before, typing = words or [""]
    if not before:
        return [(command.name, command.help) for command in COMMANDS if command.name.startswith(typing)]
    if before[0] not in BY_NAME:
        return []
    command = _parser(before[0])
    for word in before[1:]:
        command = getattr(command, "commands", {}).get(word, command)
    found = [(name, child.get_short_help_str(60)) for name, child in sorted(getattr(command, "commands", {}).items())]
    if typing.startswith("-"):
        found = [
            (option, str(getattr(parameter, "help", "") or "")) for parameter in command.params for option in parameter.opts
        ]
    return [(name, text) for name, text in found if name.startswith(typing)]


def _parser(name: str) -> Any:
    from importlib import import_module

    from typer.main import get_command

    return get_command(import_module(f"reef_cli.commands.{BY_NAME[name].module}").app)
