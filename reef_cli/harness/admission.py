"""What a candidate tree must survive before it is evaluated: validation, and a real start of the real agent.

One broken extension stops some agents altogether and others drop a broken skill without a word, so a tree is started once
against a model that always says the same. `provision` gives the server its own copy of an agent for this and for episodes.
"""

import base64
import threading
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from reef_cli.core.errors import EvaluationError
from reef_cli.harness.adapter import Adapter
from reef_cli.harness.client import agent as programs
from reef_cli.harness.client.store import Place, Refused, locked
from reef_cli.harness.episodes import Caps, Episode, Runtime, Task, run
from reef_cli.harness.install import bundle
from reef_cli.harness.probe import Probe
from reef_cli.harness.tree import Tree

_CAPS = Caps(seconds=90.0, requests=20)


def provision(adapter: Adapter, base: Path, environment: Mapping[str, str], version: str | None = None) -> Place:
    """Install the pinned agent below `base` unless it is there; blocking. `EvaluationError` has the installer's words."""
    place = Place(base, adapter.name, "episodes")
    plan = asdict(adapter.plan(version))
    packed = {plan["package"]: base64.b64encode(bundle(plan["package"])).decode()} if plan["manager"] == "bundled" else {}
    try:
        programs.preflight(plan, environment)
        with locked(place.adapter / "lock"):
            programs.ensure(place, plan, packed, environment, lambda _: None)
    except Refused as error:
        raise EvaluationError(f"{adapter.name} could not be installed for episodes: {error}", hint=error.hint) from error
    return place


def load_test(runtime: Runtime, tree: Tree, state: Path, cancel: threading.Event | None = None) -> Episode:
    """One turn of the agent with this tree; `fault` reads the result. `UnsupportedArtifact` when it cannot take the tree."""
    with Probe() as probe:
        local = replace(runtime, gateway=probe.url, token="", headers={})
        return run(local, tree, Task("load-test", "Say ok."), state=state, caps=_CAPS, cancel=cancel)


def fault(episode: Episode) -> str | None:
    """Why the agent did not get through its load test, or None."""
    if episode.outcome == "outage":
        return episode.reason
    if episode.limit is not None:
        return f"the agent does not finish one turn within its {episode.limit} limit"
    if episode.exit_status != 0 or episode.trajectory.error:
        return episode.reason
    return None
