"""The loop: ask the model, run the tools it calls, until it answers in words or the turns are used up."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .chat import ChatError, complete
from .harness import Harness
from .tools import SCHEMAS, call


class Session:
    """One conversation and its file under `<harness>/sessions/`. A line is written per message, at once."""

    def __init__(self, harness: Harness, base_url: str, token: str, model: str) -> None:
        self.harness = harness
        self.base_url, self.token, self.model = base_url, token, model
        self.messages: list[dict[str, Any]] = []
        identity = f"{int(time.time() * 1000):013d}_{uuid.uuid4().hex[:8]}"
        self.path = harness.folder / "sessions" / f"{identity}.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._write(
            {"type": "session", "version": 1, "id": identity, "cwd": str(Path.cwd()), "model": model, "at": time.time()}
        )
        system = harness.system()
        if system:
            self._add({"role": "system", "content": system})

    def ask(self, prompt: str) -> str:
        """Answer one prompt; returns the final words. Raises `ChatError`, which is noted in the session file too."""
        self._add({"role": "user", "content": self.harness.user(prompt)})
        try:
            for _ in range(int(self.harness.settings["max_turns"])):
                message = self._turn()
                if not message.get("tool_calls"):
                    return str(message.get("content") or "")
                for wanted in message["tool_calls"]:
                    self._add({"role": "tool", "tool_call_id": wanted.get("id", ""), "content": _run(wanted)})
            raise ChatError(f"gave up after {self.harness.settings['max_turns']} turns")
        except ChatError as error:
            self._write({"type": "message", "message": {"role": "assistant", "content": "", "error": str(error)}})
            raise

    def _turn(self) -> dict[str, Any]:
        tools = [item for item in SCHEMAS if item["function"]["name"] in self.harness.settings["tools"]]
        body = {
            "model": self.model,
            "messages": self.messages,
            **self.harness.settings["sampling"],
            **({"tools": tools} if tools else {}),
        }
        answer = complete(self.base_url, self.token, body)
        given = answer["choices"][0]["message"]
        message = {"role": "assistant", "content": given.get("content")}
        if given.get("tool_calls"):
            message["tool_calls"] = given["tool_calls"]
        self._add(message, response_id=answer.get("id"), usage=answer.get("usage"))
        return message

    def _add(self, message: dict[str, Any], **more: Any) -> None:
        self.messages.append(message)
        self._write(
            {"type": "message", "message": {**message, **{key: value for key, value in more.items() if value is not None}}}
        )

    def _write(self, entry: Mapping[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def _run(wanted: Mapping[str, Any]) -> str:
    function = wanted.get("function") or {}
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except ValueError:
        return "error: the arguments are not JSON"
    return call(str(function.get("name")), arguments)


def from_environment() -> Session:
    """A session as the wrapper or an episode sets it up."""
    environment = os.environ
    harness = Harness(Path(environment.get("REEF_NATIVE_DIR") or "."), Path.cwd())
    return Session(
        harness, environment["REEF_BASE_URL"], environment.get("REEF_TOKEN", ""), environment.get("REEF_MODEL", "default")
    )
