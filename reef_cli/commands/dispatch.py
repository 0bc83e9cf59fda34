"""From the words of the command line to one command: import its module, run it, turn what it raises into an exit code.

`reef --help` and `--version` are answered here from the table alone; Typer is imported only for a real command.
"""

import os
import sys
from collections.abc import Sequence
from typing import Any

from reef_cli.commands import failure
from reef_cli.commands.table import BY_NAME
from reef_cli.core.errors import ReefError, UsageError


def run(argv: Sequence[str]) -> int:
    """Run one command line; returns the exit code and never raises."""
    words = [word for word in argv if word not in ("--debug", "--no-color")]
    debug = "--debug" in argv or bool(os.environ.get("REEF_DEBUG"))
    if "--no-color" in argv:
        os.environ["NO_COLOR"] = "1"
    as_json = "--json" in words
    try:
        return _run(words)
    except ReefError as error:
        if debug and error.__cause__ is not None:
            import traceback

            traceback.print_exception(error)
        return failure.show(error, as_json=as_json)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return failure.INTERRUPTED
    except BrokenPipeError:
        # The reader left (`reef records list | head`); keep Python from complaining again while it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return failure.BROKEN_PIPE
    except Exception as error:  # the edge of the process: whatever was not anticipated is a bug and is said to be one
        return failure.unexpected(error, argv, as_json=as_json, debug=debug)


def _run(words: Sequence[str]) -> int:
    if "_REEF_COMPLETE" in os.environ:
        from reef_cli.commands.completion import complete

        return complete()
    if not words or words[0] in ("-h", "--help", "help"):
        from reef_cli.commands.help import root_help

        print(root_help(), end="")
        return 0
    if words[0] in ("--version", "-V"):
        from reef_cli.commands.help import version_text

        print(version_text())
        return 0
    return _command(words[0], words[1:])


def _command(name: str, words: Sequence[str]) -> int:
    command = BY_NAME.get(name)
    if command is None:
        from difflib import get_close_matches

        close = get_close_matches(name, BY_NAME, 1)
        hint = f"did you mean: reef {close[0]}" if close else "see: reef --help"
        raise UsageError(f"there is no command {name!r}", hint=hint)
    from importlib import import_module

    app = import_module(f"reef_cli.commands.{command.module}").app
    return invoke(app, f"reef {name}", words)


def invoke(app: Any, title: str, words: Sequence[str]) -> int:
    """Run a Typer application; its parser's complaints become usage errors."""
    import typer
    from typer.main import get_command

    # BadParameter -> UsageError -> ClickException, wherever this version of Typer keeps its parser.
    parser_error: type[Exception] = typer.BadParameter.__mro__[2]
    try:
        result = get_command(app).main(args=list(words), prog_name=title, standalone_mode=False)
    except typer.Abort:
        print("stopped; nothing was changed", file=sys.stderr)
        return failure.INTERRUPTED
    except parser_error as error:
        context = getattr(error, "ctx", None)
        where = str(getattr(context, "command_path", title))
        if type(error).__name__ == "NoArgsIsHelpError" and context is not None:
            print(context.get_help())
            return UsageError.exit_code
        raise failure.usage(str(getattr(error, "format_message", error.__str__)()), where) from error
    return result if isinstance(result, int) and not isinstance(result, bool) else 0
