"""`reef stop`: ask the home's server to drain, wait until it is gone."""

import os
import signal
import time
from contextlib import suppress
from typing import Annotated

import typer

from reef_cli.commands.shell import Shell, new_app, with_shell
from reef_cli.control.discovery import alive
from reef_cli.core.errors import NotRunning, ReefError

app = new_app()


@app.command()
@with_shell(local=True)
def stop(
    shell: Shell,
    timeout_s: Annotated[float, typer.Option("--timeout-s", min=0.0, help="Longest wait for open requests")] = 60.0,
    force: Annotated[bool, typer.Option("--force", help="Do not wait for open requests")] = False,
) -> None:
    """Stop the running server after its open requests"""
    running = shell.running
    if running is None:
        raise NotRunning(f"no server runs for {shell.home.root}", hint="another home? give --home")
    begun = time.monotonic()
    _signal(running.pid)
    if force:
        _signal(running.pid)  # the second one tells it not to wait
    shell.say(f"stopping process {running.pid}" + ("" if force else " after its open requests"))
    while alive(running.pid, shell.home.running):
        if time.monotonic() - begun > timeout_s:
            raise ReefError(
                f"the server still runs after {timeout_s:g} s",
                why="requests or a publication are under way",
                hint="reef stop --force ends them",
                pid=running.pid,
            )
        time.sleep(0.05)
    seconds = round(time.monotonic() - begun, 2)
    shell.emit({"stopped": True, "pid": running.pid, "seconds": seconds}, lambda: print(f"stopped in {seconds} s"))


def _signal(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
