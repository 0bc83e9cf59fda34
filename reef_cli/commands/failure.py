"""How a command fails: three lines on stderr (what, why, what to do), or one JSON object on stdout, and the exit code.

An unexpected exception is a bug: its traceback goes to a log file whose path is printed, or to stderr with `--debug`.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from reef_cli.control.plain import one_line
from reef_cli.core.errors import ReefError, UsageError

INTERRUPTED = 130
BROKEN_PIPE = 141


def show(error: ReefError, *, as_json: bool) -> int:
    """Print an anticipated failure; returns its exit code."""
    if as_json:
        payload = error.payload()
        payload["error"]["exit_code"] = error.exit_code
        print(json.dumps(payload, indent=2, default=str))
        return error.exit_code
    print(f"error: {one_line(error.message)}", file=sys.stderr)
    if error.why:
        print(f"  why: {one_line(error.why)}", file=sys.stderr)
    if error.hint:
        print(f"  fix: {one_line(error.hint)}", file=sys.stderr)
    return error.exit_code


def unexpected(error: BaseException, argv: Sequence[str], *, as_json: bool, debug: bool) -> int:
    """Print a bug: where its traceback is, never the traceback itself unless `--debug`."""
    text = "".join(traceback.format_exception(error))
    if debug:
        print(text, file=sys.stderr, end="")
        kept = "printed above"
    else:
        kept = _keep(text, argv)
    why = f"{type(error).__name__}: {error}"
    return show(ReefError("reef failed unexpectedly; this is a bug", why=why, hint=f"traceback: {kept}"), as_json=as_json)


def usage(message: str, command: str) -> UsageError:
    """A wrong use of a command, in the common form."""
    return UsageError(message[:1].lower() + message[1:].rstrip("."), hint=f"see: {command} --help")


def _keep(text: str, argv: Sequence[str]) -> str:
    """Write the traceback to the home's logs when there is a home, else to the user's state folder."""
    home = Path(_flag(argv, "--home") or os.environ.get("REEF_HOME") or ".reef").expanduser()
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "reef"
    folder = home / "logs" if home.is_dir() else state
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / f"reef-cli-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}.log"
        path.touch(mode=0o600)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        return f"could not be kept ({error.strerror}); run again with --debug"
    return str(path.absolute())


def _flag(argv: Sequence[str], name: str) -> str | None:
    for word, following in zip(argv, [*argv[1:], ""], strict=True):
        if word == name:
            return following
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return None
