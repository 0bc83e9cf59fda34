"""A bar on stderr while the server works on one long answer; nothing where stderr is no terminal or `--json` is given."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from reef_cli.commands.shell import Shell
from reef_cli.core.errors import ReefError

EVERY_S = 0.5


@contextmanager
def evaluation_bar(shell: Shell, scenario: str) -> Iterator[None]:
    """Shows how far `scenario`'s evaluation is, as `GET /reef/status` tells it, until the block ends."""
    if shell.json or not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("answers"),
        TimeRemainingColumn(),
    )
    ended = threading.Event()
    with Progress(*columns, console=Console(stderr=True, highlight=False), transient=True) as bar:
        watcher = threading.Thread(target=_watch, args=(shell, scenario, bar, ended), daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join(timeout=2.0)


def _watch(shell: Shell, scenario: str, bar: Any, ended: threading.Event) -> None:
    from reef_cli.control.client import Client

    client = Client(shell.client.url, shell.token(), timeout_s=5.0)
    task = None
    while not ended.wait(EVERY_S):
        # The answer itself tells when the server is gone; a bar that stands still for a moment is no fault.
        with suppress(ReefError):
            told = client.get("/reef/status").get("evaluating")
            if told is None:
                continue
            name = told["suite"] if told["scenario"] == scenario else f"waiting for {told['scenario']}"
            task = bar.add_task(name) if task is None else task
            bar.update(task, description=name, completed=told["done"], total=told["total"])
    client.close()
