"""One run of the agent: requirements, update notice, synced files, capture proxy, the agent itself, its exit status."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from . import agent, launch, proxy, requires, spool, sync
from .api import Gateway, token_of
from .store import Place, Refused, get_json, put_json


class Session:
    """An installed scenario, ready to run and to talk to its gateway."""

    def __init__(self, place: Place, environment: dict[str, str]) -> None:
        self.place = place
        self.environment = environment
        self.spec: dict[str, Any] = get_json(place.spec, {})
        if not self.spec:
            raise Refused(f"nothing is installed at {place.root}", "install it again")
        self.token = token_of(place.token, environment)
        self.gateway = Gateway(environment.get("REEF_GATEWAY") or self.spec["gateway"], self.spec["scenario"], self.token)

    @property
    def name(self) -> str:
        return str(os.path.basename(self.spec["wrapper"]))  # noqa: PTH119 - a name, no path

    def check_requirements(self) -> None:
        missing = requires.unmet(self.spec.get("requires", ()), self.environment, get_json(self.place.setup, []))
        if missing:
            raise Refused(
                f"this release needs something this machine lacks\n{requires.explain(missing, self.name)}", code=requires.EXIT
            )

    def newer(self) -> Mapping[str, Any] | None:
        """The head release when it is not the installed one and was not skipped; None also when the gateway does not answer."""
        try:
            head = self.gateway.json("GET", f"/reef/harness?adapter={self.spec['adapter']}", timeout=2.0)
        except (Refused, ValueError):
            return None
        known = (self.spec["release_id"], get_json(self.place.root / "skipped.json"))
        same = head.get("content_id") is not None and head.get("content_id") == self.spec.get("content_id")
        return None if not head.get("release_id") or head["release_id"] in known or same else dict(head)

    def skip(self, release_id: str) -> None:
        put_json(self.place.root / "skipped.json", release_id)

    def update(self, release_id: str | None = None) -> int:
        """Fetch the install script of the head (or of one release) and run it; the same road as the first install."""
        script = self._script(release_id)
        inside = {**self.environment, "REEF_HARNESS_HOME": str(self.place.base), "REEF_TOKEN": self.token}
        inside["REEF_BIN_DIR"] = os.path.dirname(self.spec["wrapper"])  # noqa: PTH120
        return subprocess.run(["/bin/sh"], input=script, env=inside, check=False).returncode

    def _script(self, release_id: str | None) -> bytes:
        """The script for the version in use, or for the server's default one when it does not pin that version any more."""
        wanted = f"{self.spec['adapter']}@{self.spec['plan']['version']}"
        tail = f"&release_id={release_id}" if release_id else ""
        try:
            return self.gateway.call("GET", f"/reef/harness/install?adapter={wanted}{tail}", timeout=120.0)
        except Refused as error:
            if "is not a pinned version" not in str(error):
                raise
            sys.stderr.write(f"reef: {error}; taking the default version\n")
            return self.gateway.call("GET", f"/reef/harness/install?adapter={self.spec['adapter']}{tail}", timeout=120.0)

    def notice(self, interactive: bool) -> str:
        """Offer a newer release: a question on a terminal, else one line for the agent or stderr. Returns that line."""
        head = self.newer()
        if head is None:
            return ""
        line = f"Reef: release {head['release_id']} is available; install it with `{self.name} update`."
        if head.get("changed"):
            line += f" What changed: {head['changed']}"
        if not interactive:
            return line
        sys.stderr.write(f"{line}\nInstall it now? [Y]es, [n]ot now, [s]kip this release: ")
        sys.stderr.flush()
        answer = sys.stdin.readline().strip().lower()[:1]
        if answer in ("", "y") and self.update() == 0:
            self.spec = get_json(self.place.spec)
            return ""
        if answer == "s":
            self.skip(head["release_id"])
        return line

    def run(self, arguments: Sequence[str]) -> int:
        """Start the agent with the user's own arguments; returns its exit status."""
        self.check_requirements()
        interactive = sys.stdin.isatty() and sys.stderr.isatty() and not arguments
        notice = self.notice(interactive)
        if notice and self.spec.get("notice") != "agent":
            sys.stderr.write(notice + "\n")
        for path in sync.sync(self.place, self.spec["launch"]["config"], self.spec["drift"]):
            sys.stderr.write(f"reef: kept your own {path}; the release's version is {self.place.tree / path}\n")
        run = spool.Run(self.place.spool, spool.new_run())
        try:
            return self._start(run, arguments, notice)
        finally:
            run.close()

    def _start(self, run: spool.Run, arguments: Sequence[str], notice: str) -> int:
        plan, how = self.spec["plan"], self.spec["launch"]
        connect, prefix = proxy.tcp(self.gateway.url)
        headers = {"x-reef-scenario": self.spec["scenario"], "x-reef-tag-session": run.id, "x-reef-tag-client": self.name}
        if self.spec["release_id"]:
            headers["x-reef-tag-harness"] = self.spec["release_id"]
        if self.token:
            headers["authorization"] = f"Bearer {self.token}"
        token = secrets.token_urlsafe(24)
        with proxy.Proxy(proxy.Upstream(connect, headers, prefix), token, run.add) as capture:
            known = launch.values(
                str(self.place.home / how["config"]),
                str(agent.program(self.place, plan)),
                capture.url,
                token,
                self.spec["model"],
                self.spec["scenario"],
                notice,
            )
            argv = launch.arguments({**how, "runner": agent.runner(plan)}, "interactive", known)
            base = {key: value for key, value in self.environment.items() if key != "REEF_TOKEN"}
            base["PATH"] = agent.search_path(self.place, plan, self.environment)
            return _wait([*argv, *arguments], launch.environment(how, known, base))


def _wait(argv: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run in the foreground. Ctrl-C reaches the agent from the terminal itself; TERM and HUP are passed on."""
    try:
        child = subprocess.Popen(argv, env=dict(environment))
    except OSError as error:
        raise Refused(f"the agent does not start: {error}", "run `doctor`", 127) from error

    def forward(number: int, _frame: Any) -> None:
        child.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, forward)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    status = child.wait()
    return 128 - status if status < 0 else status
