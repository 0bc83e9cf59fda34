"""Calls to the gateway. Never through an HTTP proxy of the shell; errors carry the gateway's own words."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from .store import Refused

_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Gateway:
    """One gateway, one scenario, one token."""

    def __init__(self, url: str, scenario: str, token: str) -> None:
        self.url = url.rstrip("/")
        self.scenario = scenario
        self.token = token

    def call(self, method: str, path: str, body: Any = None, timeout: float = 30.0) -> bytes:
        """The answer's bytes. `Refused` names the status and the gateway's message."""
        headers = {"x-reef-scenario": self.scenario, "content-type": "application/json"}
        if self.token:
            headers["authorization"] = f"Bearer {self.token}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, headers=headers, method=method)
        try:
            with _direct.open(request, timeout=timeout) as answer:
                found: bytes = answer.read()
                return found
        except urllib.error.HTTPError as error:
            raise Refused(
                f"{method} {path}: {error.code} {_message(error.read())}", code=4 if error.code == 409 else 1
            ) from error
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise Refused(f"no answer from {self.url}: {reason}", "is `reef serve` running there?", code=6) from error

    def json(self, method: str, path: str, body: Any = None, timeout: float = 30.0) -> Any:
        return json.loads(self.call(method, path, body, timeout))


def token_of(token_file: Path, environment: dict[str, str]) -> str:
    """The token: from the environment when set, else from the 0600 file of the installation."""
    if environment.get("REEF_TOKEN"):
        return environment["REEF_TOKEN"]
    try:
        return token_file.read_text().strip()
    except OSError:
        return ""


def _message(body: bytes) -> str:
    try:
        error = json.loads(body)["error"]
        return " ".join(str(error[key]) for key in ("message", "hint") if error.get(key))
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")
