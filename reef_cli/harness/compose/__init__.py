"""The compose engine: parts of a running harness that can be mounted, replaced and taken away, leaving nothing behind.

It follows the semantics of Cordis (contexts, effects, fibers, services, loader entries) with one deliberate change: a fiber's
teardown is strictly sequential, so that what was built last is gone before what it stood on is touched. Knows nothing of
files, agents or releases; `workbench` builds on it.
"""

from reef_cli.harness.compose.context import Context
from reef_cli.harness.compose.effect import Effect
from reef_cli.harness.compose.fiber import Fiber, Plugin, State
from reef_cli.harness.compose.loader import Loader, Options

__all__ = ["Context", "Effect", "Fiber", "Loader", "Options", "Plugin", "State"]
