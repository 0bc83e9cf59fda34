"""The composition root: starts the parts of `reef serve`, plugs them together, and stops them in order.

The only room that knows all others. Nothing imports it but the `serve` command.
"""

from reef_cli.config.load import Loaded


def run(loaded: Loaded) -> int:
    """Serve until told to stop; the process's exit code."""
    from reef_cli.supervisor.run import run as serve

    return serve(loaded)
