"""Discovery's side of a running Reef: ask the served model, report scores, wait for the training step, know the head.

Works over whatever makes the API calls (`Caller`); several threads ask at once, each with a caller of its own. Knows no
problem.
"""

import hashlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol
from urllib.parse import quote

from reef_cli.core.errors import TrainerError, UnavailableError, UpstreamError
from reef_cli.discovery.archive import Rollout
from reef_cli.discovery.problem import Ask

RECEIPT, RELEASE = "x-reef-agent-record-id", "x-reef-release-id"
ANSWER_TIMEOUT_S = 600.0
PATIENCE_S = 120.0
"""How long calls are tried again while the server cannot take them."""


class Answered(Protocol):
    """What a call gives back."""

    @property
    def json(self) -> Any: ...
    @property
    def headers(self) -> Mapping[str, str]: ...


class Caller(Protocol):
    """Makes API calls; raises the errors of `core.errors`."""

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Answered: ...


@dataclass(frozen=True, slots=True)
class Proposal:
    """A model's text, its receipt, and the release that wrote it."""

    text: str
    receipt: str | None
    release: str | None = None


@dataclass(frozen=True, slots=True)
class Standing:
    """A scenario as the server describes it: the head, and how many samples have met their fate."""

    head: str | None
    samples_done: int
    waiting: int
    busy: bool
    phase: str = ""


class Desk:
    """One scenario of one server. `pin` asks a fixed release instead of the head and leaves no record."""

    def __init__(
        self, connect: Callable[[], Caller], scenario: str, *, temperature: float = 1.0, pin: str | None = None
    ) -> None:
        self._connect = connect
        self._scenario = scenario
        self._temperature = temperature
        self._pin = pin
        self._own = threading.local()

    # -- asking ----------------------------------------------------------------------------------------------------------

    def propose(self, ask: Ask, seed: int) -> Proposal:
        """One sampled answer."""
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": ask.max_tokens,
            "temperature": self._temperature,
            **({"stop": list(ask.stop)} if ask.stop else {}),
        }
        if ask.chat:  # not every provider takes a seed
            path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": ask.prompt}]
        else:
            path, body["prompt"], body["seed"] = "/v1/completions", ask.prompt, seed % 2**31
        answer = self._call("POST", path, body, timeout_s=ANSWER_TIMEOUT_S)
        return Proposal(_text(answer.json, ask.chat), answer.headers.get(RECEIPT), answer.headers.get(RELEASE))

    @cached_property
    def model(self) -> str:
        """The name a request gives the served model; providers do not take any other."""
        rows = self._call("GET", "/v1/models").json.get("data") or []
        return str(rows[0]["id"]) if rows else "default"

    # -- learning --------------------------------------------------------------------------------------------------------

    def settings(self) -> Mapping[str, Any]:
        """The recipe's settings with its name under `recipe`; empty where nothing learns."""
        contract = self._call("GET", f"/reef/scenarios/{quote(self._scenario, safe='')}/contract").json
        return {**contract["settings"], "recipe": contract.get("recipe")} if contract.get("settings") else {}

    def open(self) -> None:
        """Make the scenario when it is new."""
        self._call("POST", "/reef/scenarios", {"name": self._scenario})

    def standing(self) -> Standing:
        rows = self._call("GET", "/reef/status").json["scenarios"]
        row = next((row for row in rows if row["name"] == self._scenario), None)
        if row is None:
            raise UpstreamError(f"the server does not list the scenario {self._scenario}")
        counts = row["counts"]
        done = sum(int(counts.get(name, 0)) for name in ("consumed", "dropped"))
        waiting = sum(int(counts.get(name, 0)) for name in ("queued", "reserved"))
        return Standing(row["head"], done, waiting, row.get("job") is not None, str(row.get("phase") or ""))

    def same_weights(self, left: str | None, right: str | None) -> bool:
        """Whether two releases hold the same content: a full gate promotes what is served under a new release."""
        if left == right or left is None or right is None:
            return left == right
        rows = self._call("GET", f"/reef/scenarios/{quote(self._scenario, safe='')}/releases").json["releases"]
        content = {row["release_id"]: row["content_id"] for row in rows}
        return left in content and content[left] == content.get(right)

    def report(self, rollout: Rollout, run: str, *, learn: bool) -> str | None:
        """Send a try's score; the reason why it will not train, or None when it will. Sending it again is harmless."""
        place = {"run": run, "step": rollout.step, "group": rollout.group, "rollout": rollout.rollout}
        metadata: dict[str, Any] = {**place, "valid": rollout.valid, "reason": rollout.reason}
        body = {
            "agent_record_id": hashlib.sha256("/".join(map(str, place.values())).encode()).hexdigest()[:32],
            "score": rollout.score,
            "references": [rollout.receipt],
            "metadata": metadata if learn else {**metadata, "eligible": False},
        }
        fates = self._call("POST", "/reef/report", body).json["eligible"]
        return next((str(fate["reason"]) for fate in fates if not fate["eligible"]), None)

    def await_trained(
        self, done_before: int, count: int, timeout_s: float, on_wait: Callable[[Standing], None] = lambda _: None
    ) -> Standing:
        """Wait until `count` samples more have met their fate and no job runs. Raises `TrainerError`, `UnavailableError`."""
        deadline = time.monotonic() + timeout_s
        while True:
            now = self.standing()
            if now.samples_done >= done_before + count and not now.busy:
                return now
            on_wait(now)
            if time.monotonic() > deadline:
                raise TrainerError(
                    f"the training step was not over within {timeout_s:g} s",
                    why=f"{now.waiting} samples wait, {'a job runs' if now.busy else 'no job runs'}",
                    hint="see: reef jobs list; the run goes on with the same command",
                )
            time.sleep(0.5)

    def _call(self, method: str, path: str, body: Any = None, *, timeout_s: float | None = None) -> Answered:
        """A call that waits for a server that is busy or starting; nothing here has an effect twice."""
        headers = {"x-reef-scenario": self._scenario}
        if self._pin is not None:
            headers |= {RELEASE: self._pin, "x-reef-capture": "off"}
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return self._caller().request(method, path, body, headers=headers, timeout_s=timeout_s)
            except UnavailableError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)

    def _caller(self) -> Caller:
        found: Caller | None = getattr(self._own, "caller", None)
        if found is None:
            found = self._own.caller = self._connect()
        return found


def _text(body: Any, chat: bool) -> str:
    try:
        choice = body["choices"][0]
        return str((choice["message"]["content"] or "") if chat else choice["text"])
    except (KeyError, IndexError, TypeError) as error:
        raise UpstreamError("the answer holds no text", hint="see: reef records list") from error
