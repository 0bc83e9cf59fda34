"""The first screen of `reef --help` and `reef --version`, made from the table alone so that they cost no imports."""

import sys
from pathlib import Path

from reef_cli import __version__
from reef_cli.commands.table import COMMANDS

_HEAD = """\
Usage: reef COMMAND [OPTIONS]

Serve a model, keep what it does as experience, and release what learning made better

Examples:
  reef serve                                     serve the default model on 127.0.0.1:8900
  reef chat "What is the capital of France?"     ask it; prints the answer and its receipt
  reef report RECEIPT --score 1                  tell it how good that answer was
"""

_FOOT = """\
Options:
  -h, --help     show this help, also after any command
  --version      show version, commit and Python
  --debug        show tracebacks [env: REEF_DEBUG]
  --no-color     plain output [env: NO_COLOR]

Every command takes --json. Commands find the server through --url [env: REEF_URL] or --home [env: REEF_HOME].
Exit codes: 0 ok, 1 failure, 2 usage, 3 not found, 4 conflict, 5 gate refused, 6 not running, 7 auth, 130 interrupted
"""


def root_help() -> str:
    """Purpose, three examples, commands by task, options."""
    groups: dict[str, list[str]] = {}
    for command in COMMANDS:
        groups.setdefault(command.group, []).append(f"  {command.name:<12} {command.help}")
    body = "\n".join(f"{group}:\n" + "\n".join(lines) + "\n" for group, lines in groups.items())
    return f"{_HEAD}\n{body}\n{_FOOT}"


def version_text() -> str:
    """`reef 0.1.0 (commit 1a2b3c4d, python 3.11.2)`; the commit only from a checkout."""
    commit = checkout_commit(Path(__file__).resolve().parents[2])
    python = ".".join(map(str, sys.version_info[:3]))
    return f"reef {__version__} ({f'commit {commit[:8]}, ' if commit else ''}python {python})"


def checkout_commit(root: Path) -> str | None:
    """The commit `root` has checked out, read from git's files (starting git costs more than all of `--version`)."""
    git = root / ".git"
    try:
        if git.is_file():  # a worktree points at its own folder
            git = root / git.read_text(encoding="utf-8").removeprefix("gitdir:").strip()
        head = (git / "HEAD").read_text(encoding="utf-8").strip()
        if not head.startswith("ref:"):
            return head or None
        return _ref(git, head.removeprefix("ref:").strip())
    except OSError:
        return None


def _ref(git: Path, name: str) -> str | None:
    common = git
    if (git / "commondir").is_file():
        common = git / (git / "commondir").read_text(encoding="utf-8").strip()
    if (common / name).is_file():
        return (common / name).read_text(encoding="utf-8").strip()
    packed = common / "packed-refs"
    lines = packed.read_text(encoding="utf-8").splitlines() if packed.is_file() else []
    return next((line.split()[0] for line in lines if line.endswith(f" {name}")), None)
