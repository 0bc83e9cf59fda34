"""What every command has: where the server is, where state lives, how to print. `with_shell` adds the common options.

A command is a function whose first parameter is a `Shell`; the decorator replaces that parameter by `--json`, `--home` and,
for clients of a server, `--url` and `--token-file`. There is no `--token`: arguments show in process listings.
"""

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import typer

from reef_cli.commands import output
from reef_cli.config.paths import Home, home_at
from reef_cli.control.discovery import Running, find_live, read_token
from reef_cli.core.errors import NotRunning, UsageError

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document")]
HomeOption = Annotated[str | None, typer.Option("--home", envvar="REEF_HOME", help="Folder of all state  [default: .reef]")]
Url = Annotated[str | None, typer.Option("--url", envvar="REEF_URL", help="Address of the server  [default: the home's]")]
TokenFile = Annotated[
    Path | None, typer.Option("--token-file", envvar="REEF_TOKEN_FILE", help="File with the token; REEF_TOKEN works too")
]
Scenario = Annotated[str, typer.Option("--scenario", "-s", envvar="REEF_SCENARIO", help="Scenario")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done and change nothing")]

_LOCAL = {"json": Json, "home": HomeOption}
_REMOTE = {"url": Url, "token_file": TokenFile, **_LOCAL}
_DEFAULTS: Mapping[str, Any] = {"json": False, "home": None, "url": None, "token_file": None}


@dataclass
class Shell:
    """One invocation: the home, the server to talk to, and how to print."""

    home: Home
    json: bool = False
    url: str | None = None
    token_file: Path | None = None
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)

    @cached_property
    def running(self) -> Running | None:
        """The live server of this home, or None."""
        return find_live(self.home.running)

    @cached_property
    def client(self) -> Any:
        """The client of the server: `--url`, else the home's own. Raises `NotRunning`."""
        from reef_cli.control.client import Client

        url = self.url or (self.running.url if self.running is not None else None)
        if url is None:
            raise NotRunning(
                f"no server runs for {self.home.root}",
                why=f"{self.home.running} names no live process",
                hint="start one: reef serve, or give --url",
            )
        return Client(url, self.token())

    def token(self) -> str | None:
        """The token to send."""
        own = self.running if self.url is None or (self.running and self.running.url == self.url) else None
        try:
            return read_token(self.environ, self.token_file, own, self.home.token)
        except OSError as error:
            raise UsageError(
                f"cannot read {self.token_file}", why=error.strerror or str(error), hint="check --token-file"
            ) from error

    def emit(self, data: Any, draw: Callable[[], None]) -> None:
        """`data` as JSON with `--json`, else what `draw` prints."""
        if self.json:
            output.as_json(data)
        else:
            draw()

    def hint(self, text: str) -> None:
        """The next command a person may want; never with `--json`."""
        if not self.json:
            output.say(f"next: {text}")

    def say(self, text: str) -> None:
        """Narration, left out with `--json`."""
        if not self.json:
            output.say(text)


def new_app(help: str | None = None) -> typer.Typer:
    """A Typer application in the house style: no rich markup, no traceback hooks, `-h` everywhere."""
    return typer.Typer(
        help=help,
        no_args_is_help=help is not None,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    )


def with_shell(*, local: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command its `Shell` as first argument; `local` commands never talk to a server."""
    options = _LOCAL if local else _REMOTE

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(**given: Any) -> Any:
            common = {name: given.pop(name) for name in options}
            shell = Shell(
                home=home_at(common["home"], os.environ),
                json=common["json"],
                url=common.get("url"),
                token_file=common.get("token_file"),
            )
            return function(shell, **given)

        signature = inspect.signature(function)
        own = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in list(signature.parameters.values())[1:]]
        added = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=_DEFAULTS[name])
            for name, kind in options.items()
        ]
        wrapper.__signature__ = signature.replace(parameters=[*own, *added])  # type: ignore[attr-defined]
        wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in [*own, *added]}
        return wrapper

    return decorate


def items(answer: Any, name: str) -> list[dict[str, Any]]:
    """The rows of a list answer: `{name: [...]}` or a bare list."""
    rows = answer.get(name, []) if isinstance(answer, dict) else answer
    return [row for row in rows or [] if isinstance(row, dict)]


def scenario_name(row: Mapping[str, Any]) -> str:
    """The name in a row of scenarios, whichever of the API's names it has."""
    return str(row.get("scenario") or row.get("name") or "")


def release_id_of(value: Any) -> str | None:
    """The id of a head, given as the release or as its id alone."""
    found = value.get("release_id") if isinstance(value, Mapping) else value
    return None if found is None else str(found)


def scenario_path(scenario: str, *parts: str) -> str:
    """`/reef/scenarios/<scenario>/...`, every part quoted."""
    from reef_cli.control.client import segment

    return "/".join(("/reef/scenarios", segment(scenario), *(segment(part) for part in parts)))


def confirm(question: str, *, yes: bool, required: bool = False) -> None:
    """Ask on a terminal. Without one: go on, or refuse when `required` (what deletes needs `--yes`)."""
    import sys

    if yes:
        return
    if sys.stdin.isatty() and sys.stderr.isatty():
        typer.confirm(question, abort=True, err=True)
    elif required:
        raise UsageError("this needs a confirmation", why="there is no terminal to ask on", hint="add --yes")
