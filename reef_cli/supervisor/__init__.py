"""The composition root: starts the parts of `reef serve`, plugs them together, and stops them in order.

The only room that knows all others. Nothing imports it but the `serve` and `demo` commands.
"""

from reef_cli.supervisor.run import run

__all__ = ["run"]
