"""Trials: episodes that the server starts to judge a tree, in a bounded pool, with an agent it installs for itself.

Each episode gets a gateway token of its own that is good for inference in its scenario and revoked when it ends; the agent sees
not even that one. What episodes leave is kept up to a limit, oldest first out.
"""

import asyncio
import os
import re
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from reef_cli.harness import admission, episodes, sandbox
from reef_cli.harness.adapter import Adapter
from reef_cli.harness.client.store import Place
from reef_cli.harness.episodes import Caps, Episode, Grade, Runtime, Task
from reef_cli.harness.pool import Executor, Job
from reef_cli.harness.tree import Tree

_INSTALLING = re.compile(
    r"(?i)PATH|HOME|LANG|LC_\w+|TMPDIR|(?:https?|all|no)_proxy|npm_config_\w+|pip_\w+|NODE_EXTRA_CA_CERTS|SSL_CERT_\w+"
)
KEPT = 500
"""Folders of ended episodes that stay; each holds a trajectory, the agent's output and the receipts."""


@dataclass(frozen=True, slots=True)
class Gateway:
    """How episodes reach the server: its address (known once it listens), the model's name, and tokens.

    `issue` makes a token for a scenario and an episode.
    """

    url: Callable[[], str]
    model: str
    issue: Callable[[str, str], str]
    revoke: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Setting:
    """The agent, its limits, and where things lie: `agents` has installed agents, `state` roots and kept episodes."""

    adapter: Adapter
    agents: Path
    state: Path
    version: str | None = None
    caps: Caps = field(default_factory=Caps)
    unsafe: bool = False


class Trials:
    """Runs tasks and load tests. The agent is installed on first use, in a thread."""

    def __init__(self, setting: Setting, gateway: Gateway, executor: Executor) -> None:
        self._setting = setting
        self._gateway = gateway
        self._executor = executor
        self._place: Place | None = None
        self._lock = asyncio.Lock()

    async def run(
        self, scenario: str, tree: Tree, task: Task, grade: Grade | None = None, tags: Mapping[str, str] | None = None
    ) -> Episode:
        """One episode of `task` with `tree`. `tags` mark the records of its calls, beside the tag `trial`."""
        place = await self._installed()
        identity = episodes.new_identity()
        token = self._gateway.issue(scenario, identity)
        headers = {f"x-reef-tag-{name}": value for name, value in (tags or {}).items()}
        runtime, setting = self._runtime(place, scenario, self._gateway.url(), token, headers), self._setting
        state, caps = setting.state, setting.caps

        def work(cancel: threading.Event) -> Episode:
            return episodes.run(runtime, tree, task, state=state, grade=grade, caps=caps, cancel=cancel, identity=identity)

        try:
            return await self._executor.run(Job(identity, task.id, work))
        finally:
            self._gateway.revoke(token)

    async def load_test(self, tree: Tree) -> str | None:
        """Why the agent does not start with `tree`, or None. `UnsupportedArtifact` when it cannot take the tree at all."""
        place = await self._installed()
        runtime, state = self._runtime(place, "load-test", "", "", {}), self._setting.state

        def work(cancel: threading.Event) -> Episode:
            return admission.load_test(runtime, tree, state, cancel)

        return admission.fault(await self._executor.run(Job(episodes.new_identity(), "load-test", work)))

    def _runtime(self, place: Place, scenario: str, url: str, token: str, headers: Mapping[str, str]) -> Runtime:
        setting = self._setting
        return Runtime(
            setting.adapter, place, url, token, scenario, self._gateway.model, setting.version, headers, setting.unsafe
        )

    async def _installed(self) -> Place:
        async with self._lock:
            if self._place is None:
                if not self._setting.unsafe:
                    sandbox.require()
                setting = self._setting
                self._place = await asyncio.to_thread(
                    admission.provision, setting.adapter, setting.agents, installing(os.environ), setting.version
                )
            return self._place

    async def prune(self, keep: int = KEPT) -> None:
        """Delete what the oldest episodes left, beyond `keep` of them."""
        await asyncio.to_thread(_prune, self._setting.state / "kept", keep)


def installing(environment: Mapping[str, str]) -> dict[str, str]:
    """What package managers need of the server's environment; its keys and tokens are not among it."""
    return {name: value for name, value in environment.items() if _INSTALLING.fullmatch(name)}


def _prune(folder: Path, keep: int) -> None:
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    for name in names[: max(0, len(names) - keep)]:
        shutil.rmtree(folder / name, ignore_errors=True)
