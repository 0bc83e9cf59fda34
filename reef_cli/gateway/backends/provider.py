"""Talking HTTP to an upstream provider: where, with which headers, and what its statuses mean here.

The provider sees the client's own headers except those of this hop, the client's token, cookies and everything of Reef's; the
key is Reef's own. One pooled client serves all requests, with no limit on the whole time of an answer, only on silence.
"""

import re
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import orjson
from multidict import CIMultiDict
from yarl import URL

from reef_cli import __version__
from reef_cli.core.errors import (
    AuthError,
    BodyTooLarge,
    ConflictError,
    ContextOverflow,
    Forbidden,
    InvalidRequest,
    NotFoundError,
    RateLimited,
    ReefError,
    UpstreamError,
    UpstreamTimeout,
)
from reef_cli.gateway.backends.wire import Answer, Unreachable, Wire
from reef_cli.gateway.dialects.canonical import names
from reef_cli.gateway.http import Response

Api = Literal["openai", "anthropic", "responses"]

_NOT_FORWARDED = names(
    "connection keep-alive proxy-authenticate proxy-authorization te trailer transfer-encoding upgrade host "
    "content-length content-encoding content-type accept-encoding authorization x-api-key cookie expect origin referer "
    "forwarded via proxy-connection"
)
_NOT_RETURNED = names(
    "connection keep-alive proxy-authenticate te trailer transfer-encoding upgrade content-length content-encoding "
    "set-cookie server date x-request-id strict-transport-security alt-svc"
)
_RELAYED = frozenset({400, 401, 403, 404, 408, 409, 413, 422, 429})
_ERRORS: Mapping[int, type[ReefError]] = {
    401: AuthError,
    403: Forbidden,
    404: NotFoundError,
    408: UpstreamTimeout,
    409: ConflictError,
    413: BodyTooLarge,
    429: RateLimited,
}
_OVERFLOW = re.compile(r"context[ _]length|prompt is too long|context window", re.IGNORECASE)
_VERSIONED = re.compile(r"/v\d+[a-z0-9]*$")
_SECRET_PREFIXES = ("x-reef-", "x-forwarded-")


class Refusal(Exception):
    """The provider answered with an error status. `text` is its words, `body` its bytes, `json` whether they are JSON."""

    def __init__(self, status: int, text: str, body: bytes, json: bool, retry_after: str | None) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.body = body
        self.json = json
        self.retry_after = retry_after

    def error(self) -> ReefError:
        """The refusal as an error of ours, for records, for other dialects and for frames inside a stream."""
        if self.status < 500 and _OVERFLOW.search(self.text):
            return ContextOverflow(self.text)
        return _ERRORS.get(self.status, InvalidRequest if self.status < 500 else UpstreamError)(self.text)


def relayed_status(status: int) -> int:
    """What the client sees for a provider's status."""
    if status in _RELAYED:
        return status
    return 400 if 400 <= status < 500 else 502


class Provider:
    """One upstream. `timeout_s` bounds its silence, `connect_s` the connection."""

    def __init__(
        self,
        url: str,
        api: Api,
        key: str | None,
        *,
        timeout_s: float = 600.0,
        connect_s: float = 10.0,
    ) -> None:
        base = URL(url.rstrip("/"))
        self._prefix = base.raw_path.rstrip("/")
        self._versioned = bool(_VERSIONED.search(self._prefix))
        self.api = api
        self._wire = Wire(base, silence_s=timeout_s, connect_s=connect_s)
        self._own = [("Accept-Encoding", "identity"), ("Content-Type", "application/json")]
        if key and api == "anthropic":
            self._own.append(("x-api-key", key))
        elif key:
            self._own.append(("Authorization", f"Bearer {key}"))
        elif base.user is not None:
            pair = f"{base.user}:{base.password or ''}".encode("latin-1")
            self._own.append(("Authorization", f"Basic {b64encode(pair).decode()}"))

    def target(self, path: str, query: str = "") -> str:
        """Where the provider has a `/v1/...` path; its base may or may not end in its version."""
        own = self._prefix + (path.removeprefix("/v1") if self._versioned else path)
        return f"{own}?{query}" if query else own

    def headers(self, client: CIMultiDict[str] | None, *, stream: bool = False) -> list[tuple[str, str]]:
        """The client's headers that go on, and Reef's own; None when the request is not the client's any more."""
        headers: list[tuple[str, str]] = []
        given: set[str] = set()
        if client is not None:
            named = client.get("Connection")
            hop = () if named is None else {name.strip().lower() for name in named.split(",")}
            for name, value in client.items():
                lowered = name.lower()
                if lowered not in _NOT_FORWARDED and lowered not in hop and not lowered.startswith(_SECRET_PREFIXES):
                    headers.append((name, value))
                    given.add(lowered)
        headers += self._own
        if "accept" not in given:
            headers.append(("Accept", "text/event-stream" if stream else "application/json"))
        if "user-agent" not in given:
            headers.append(("User-Agent", f"reef/{__version__}"))
        if self.api == "anthropic" and "anthropic-version" not in given:
            headers.append(("anthropic-version", "2023-06-01"))
        return headers

    async def ask(self, target: str, raw: bytes | None, headers: Sequence[tuple[str, str]]) -> Answer:
        """The answer to a POST, or to a GET where `raw` is None; its head is there when this returns.

        Raises `Refusal`, `UpstreamError`, `UpstreamTimeout`.
        """
        try:
            response = await self._wire.ask("POST" if raw is not None else "GET", target, headers, raw)
            if response.status != 200:
                raise await _refusal(response)
        except OSError as error:
            raise broken(error) from error
        return response

    def close(self) -> None:
        self._wire.close()


async def _refusal(response: Answer) -> Refusal:
    body = await response.read()
    text, is_json = _words(body)
    return Refusal(response.status, text or f"the upstream refused with {response.reason}", body, is_json, _wait(response))


def _wait(response: Answer) -> str | None:
    value = response.header("retry-after")
    return value or ("2" if response.status in (429, 503) else None)


def _words(body: bytes) -> tuple[str, bool]:
    """`(text, is_json)` of an error body in any of the usual shapes."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body.decode("utf-8", "replace").strip()[:2000], False
    if not isinstance(value, dict):
        return str(value)[:2000], False
    error = value.get("error", value)
    text = error.get("message") or error.get("detail") if isinstance(error, dict) else error
    return str(text or "")[:2000], True


def broken(error: BaseException) -> ReefError:
    """A failed connection as an error of ours; the provider's address stays out of the words."""
    if isinstance(error, TimeoutError):
        return UpstreamTimeout("upstream timeout: the provider did not answer in time")
    if isinstance(error, Unreachable):
        return UpstreamError("upstream connection error: the provider cannot be reached")
    return UpstreamError("upstream connection error: the provider broke the connection off")


def returned_headers(response: Answer) -> Iterator[tuple[str, str]]:
    """The provider's headers that reach the client."""
    for name, value, key in response.headers:
        if key not in _NOT_RETURNED and not key.startswith("x-reef-"):
            yield name, value


def relay(refusal: Refusal, shape: Mapping[str, Any] | None, headers: Mapping[str, str]) -> Response:
    """A provider's refusal for the client: its own bytes when they are JSON of the client's dialect, else `shape`."""
    answer = Response(
        status=relayed_status(refusal.status),
        body=refusal.body if shape is None else orjson.dumps(shape),
        headers={**headers, "Content-Type": "application/json"},
    )
    if refusal.retry_after is not None:
        answer.headers["Retry-After"] = refusal.retry_after
    return answer


async def read_all(response: Answer) -> bytes:
    """The whole body."""
    try:
        return await response.read()
    except OSError as error:
        raise broken(error) from error


def parsed(raw: bytes) -> dict[str, object]:
    """A whole answer as an object, or `UpstreamError`."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise UpstreamError("the upstream's answer is not JSON: server error there") from error
    if not isinstance(body, dict):
        raise UpstreamError("the upstream's answer is no object: server error there")
    return body
