"""`reef tui`: the dashboard, a client of the HTTP API; closing it stops nothing."""

import sys

from reef_cli.commands.shell import Shell, new_app, with_shell
from reef_cli.core.errors import UsageError

app = new_app()


@app.command()
@with_shell()
def tui(shell: Shell) -> int:
    """Open the dashboard; p promotes, r rolls back, space pauses, q quits"""
    if shell.json or not sys.stdout.isatty():
        raise UsageError("the dashboard needs a terminal", hint="for scripts: reef status --json")
    client = shell.client
    from reef_cli.tui.app import ReefApp

    return int(ReefApp(client.url, shell.token()).run() or 0)
