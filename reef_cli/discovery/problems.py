"""Problems by name: `packing-26`, `packing-32` or any other number of circles, or a person's own `module:Class`."""

import importlib
import re
from typing import Any

from reef_cli.core.errors import ConfigError
from reef_cli.discovery.problem import Problem

_PACKING = re.compile(r"packing-(\d+)")
_NEEDED = ("name", "statement", "verifier", "starts", "space", "same", "draw")


def find(name: str, settings: dict[str, Any]) -> Problem:
    """The problem called `name`, made with `settings` (`tolerance` of the packings). Raises `ConfigError`."""
    packing = _PACKING.fullmatch(name)
    if packing is not None:
        from reef_cli.discovery.packing.circles import PackingProblem

        return PackingProblem(int(packing[1]), **settings)
    module, _, attribute = name.partition(":")
    if not attribute:
        raise ConfigError(f"there is no problem {name!r}", hint="packing-26, packing-32, or module:Class of your own")
    try:
        problem: Problem = getattr(importlib.import_module(module), attribute)(**settings)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"the problem {name!r} cannot be made", why=str(error), hint="write it as module:Class") from error
    missing = [part for part in _NEEDED if not hasattr(problem, part)]
    if missing:
        raise ConfigError(f"the problem {name!r} has no {missing[0]}", hint="see reef_cli/discovery/problem.py")
    return problem
