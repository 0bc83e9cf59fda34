"""Blocking calls to an engine's control routes, for the trainer's rank 0. Standard library only.

Promises: a connection per call (control calls are rare and a kept one may have been closed), an upper bound on the wait, and
`EngineError` for anything but success, with the engine's own words. Keys travel in a header and appear nowhere else: `key`
for control routes, `read_key` for the others (an engine with an admin key takes that one on control routes only).
"""

import http.client
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from reef_cli.core.errors import EngineError


class EngineHttp:
    """Control calls to one engine."""

    def __init__(self, url: str, key: str | None = None, read_key: str | None = None) -> None:
        self.url = url
        self.key = key
        self.read_key = read_key or key
        self.ranks: int | None = None
        """How many ranks the engine is spread over, once somebody asked."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise EngineError(f"{url!r} is no engine address", hint="use http://HOST:PORT")
        self._host, self._port, self._secure = parts.hostname, parts.port, parts.scheme == "https"

    def get(self, path: str, timeout_s: float) -> Mapping[str, Any]:
        return self._call("GET", path, None, timeout_s)

    def post(self, path: str, body: Mapping[str, Any], timeout_s: float) -> Mapping[str, Any]:
        return self._call("POST", path, body, timeout_s)

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> Mapping[str, Any]:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=timeout_s)
        key = self.read_key if method == "GET" else self.key
        headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            data, status = response.read(), response.status
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(f"The engine did not answer {path}", why=str(error) or type(error).__name__) from error
        finally:
            connection.close()
        answer = _parse(data)
        if status != 200 or answer.get("success") is False:
            raise EngineError(
                f"The engine refused {path}", why=str(answer.get("message") or data[:300].decode(errors="replace")), http=status
            )
        return answer


def _parse(data: bytes) -> Mapping[str, Any]:
    try:
        answer = json.loads(data)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}
