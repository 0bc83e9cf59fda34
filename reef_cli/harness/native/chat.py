"""One call of the chat completions route, without streaming, with a few patient retries for transient failures."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

TRANSIENT = (408, 429, 500, 502, 503, 504)
PAUSES_S = (0.5, 1.0, 2.0, 4.0)


class ChatError(Exception):
    """The model could not be asked; the text is the server's."""


def complete(base_url: str, token: str, body: Mapping[str, Any], sleep: Callable[[float], None] = time.sleep) -> dict[str, Any]:
    """The decoded answer."""
    for pause in (*PAUSES_S, None):
        try:
            status, after, data = _post(base_url, token, json.dumps(body).encode())
        except (OSError, http.client.HTTPException) as error:
            status, after, data = 502, None, json.dumps({"error": {"message": f"connection error: {error}"}}).encode()
        if status == 200:
            return _decoded(data)
        if status not in TRANSIENT or pause is None:
            raise ChatError(f"{status}: {_message(data)}")
        sleep(min(float(after), 30.0) if after and after.replace(".", "", 1).isdigit() else pause)
    raise AssertionError("unreachable")


def _post(base_url: str, token: str, body: bytes) -> tuple[int, str | None, bytes]:
    parts = urlsplit(base_url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "127.0.0.1", parts.port, timeout=900)
    try:
        headers = {"content-type": "application/json", "authorization": f"Bearer {token}"}
        connection.request("POST", parts.path.rstrip("/") + "/v1/chat/completions", body, headers)
        answer = connection.getresponse()
        return answer.status, answer.headers.get("retry-after"), answer.read()
    finally:
        connection.close()


def _decoded(data: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(data)
        answer["choices"][0]["message"]["role"]
    except (ValueError, LookupError, TypeError) as error:
        raise ChatError(f"the answer is no chat completion: {data[:200]!r}") from error
    found: dict[str, Any] = answer
    return found


def _message(data: bytes) -> str:
    try:
        return str(json.loads(data)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return data[:300].decode(errors="replace")
