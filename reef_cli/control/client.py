"""The client of Reef's HTTP API that the command line and the dashboard share. Standard library only, quick to import.

One connection is kept open per `Client`; calls block, so the dashboard uses it from worker threads (one client per thread).
Errors come back as the classes the server raised; no server at the address is `NotRunning`. Redirects are not followed, so the
token goes only to the address that was named. The client knows no business rule.
"""

import http.client
import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from reef_cli.control.faults import error_of
from reef_cli.control.sse import Event, parse_events
from reef_cli.core.errors import NotRunning, ReefError, UnavailableError, UpstreamError, UsageError


@dataclass(frozen=True, slots=True)
class Answer:
    """A 2xx answer: the body as JSON (None when empty) and headers with lower-case names."""

    status: int
    json: Any
    headers: Mapping[str, str]


class Client:
    """Calls to one server. `token` goes out as a bearer token; `timeout_s` bounds each wait for bytes."""

    def __init__(self, url: str, token: str | None = None, *, timeout_s: float = 30.0) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"{url!r} is no address of a Reef server", hint="give --url http://HOST:PORT")
        self.url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/')}"
        self._secure = parts.scheme == "https"
        self._host, self._port, self._prefix = parts.hostname, parts.port, parts.path.rstrip("/")
        self._token = token
        self._timeout = timeout_s
        self._connection: http.client.HTTPConnection | None = None
        self._streaming: socket.socket | None = None

    def get(self, path: str, **query: Any) -> Any:
        """The JSON of `GET path`; query values that are None are left out."""
        return self.request("GET", with_query(path, query)).json

    def post(self, path: str, body: Any = None, *, timeout_s: float | None = None) -> Any:
        """The JSON of `POST path`."""
        return self.request("POST", path, {} if body is None else body, timeout_s=timeout_s).json

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Answer:
        """One call. Raises the error the server named, `NotRunning` without a server, `UnavailableError` on silence.

        A kept connection that the server closed meanwhile is opened anew once, but only where that cannot repeat an effect.
        """
        payload = None if body is None else json.dumps(body, allow_nan=False).encode()
        with self._failures(timeout_s or self._timeout):
            reused = self._connection is not None
            try:
                response = self._send(method, path, payload, headers, timeout_s)
            except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
                if not reused or method != "GET":
                    raise
                response = self._send(method, path, payload, headers, timeout_s)
            raw = response.read()
        if not 200 <= response.status < 300:
            raise error_of(response.status, raw)
        return Answer(response.status, _decode(raw, self.url), {name.lower(): value for name, value in response.getheaders()})

    def events(self, cursor: str | None = None, *, timeout_s: float = 45.0) -> Iterator[Event]:
        """Events of `/reef/events` after `cursor`, on a connection of their own, until the server ends the stream.

        The first event is `open`, without data: the stream stands. The server sends keep-alives; a silence of `timeout_s`
        raises `UnavailableError`. Reconnecting is the caller's choice.
        """
        connection = self._open(timeout_s)
        headers = {**self._headers(None), "Accept": "text/event-stream"} | ({"Last-Event-ID": cursor} if cursor else {})
        with self._failures(timeout_s):
            try:
                connection.request("GET", f"{self._prefix}/reef/events", headers=headers)
                # http.client forgets the socket of an answer without a length; `close` needs it.
                self._streaming = connection.sock
                response = connection.getresponse()
                if response.status != 200:
                    raise error_of(response.status, response.read())
                yield Event("open", "", None)
                yield from parse_events(response)
            finally:
                self._streaming = None
                connection.close()

    def close(self) -> None:
        """Give the kept connection back and end a stream of events that another thread reads; the client stays usable."""
        streaming = self._streaming
        if streaming is not None:
            with suppress(OSError):
                streaming.shutdown(socket.SHUT_RDWR)
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _send(
        self, method: str, path: str, payload: bytes | None, headers: Mapping[str, str] | None, timeout_s: float | None
    ) -> http.client.HTTPResponse:
        if self._connection is None:
            self._connection = self._open(self._timeout)
        connection = self._connection
        connection.timeout = timeout_s or self._timeout
        if connection.sock is not None:
            connection.sock.settimeout(connection.timeout)
        try:
            connection.request(method, self._prefix + path, body=payload, headers={**self._headers(payload), **(headers or {})})
            return connection.getresponse()
        except BaseException:
            self.close()
            raise

    def _open(self, timeout_s: float) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        return kind(self._host, self._port, timeout=timeout_s)

    def _headers(self, payload: bytes | None) -> dict[str, str]:
        headers = {"Accept": "application/json", "User-Agent": "reef-cli"}
        if payload is not None:
            headers["Content-Type"] = "application/json"
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        return headers

    @contextmanager
    def _failures(self, timeout_s: float) -> Iterator[None]:
        """Name what went wrong on the wire."""
        try:
            yield
        except ReefError:
            raise  # already named by the server; some are OSErrors too
        except (ConnectionRefusedError, socket.gaierror) as error:
            raise NotRunning(f"no Reef server answers at {self.url}", why=str(error), hint="start one: reef serve") from error
        except TimeoutError as error:
            raise UnavailableError(
                f"the server at {self.url} was silent for {timeout_s:g} s", hint="it may be busy; see: reef status"
            ) from error
        except (http.client.HTTPException, OSError) as error:
            why = str(error) or type(error).__name__
            raise NotRunning(f"the connection to {self.url} broke", why=why, hint="see: reef status") from error


def with_query(path: str, query: Mapping[str, Any]) -> str:
    """`path` with the query's non-None values."""
    pairs = [
        (key, str(value).lower() if isinstance(value, bool) else value) for key, value in query.items() if value is not None
    ]
    return f"{path}?{urlencode(pairs)}" if pairs else path


def segment(name: str) -> str:
    """`name` as one segment of a path."""
    return quote(name, safe="")


def _decode(raw: bytes, url: str) -> Any:
    if not raw.strip():
        return None
    try:
        return json.loads(raw)
    except ValueError as error:
        raise UpstreamError(f"{url} answered something that is not JSON", hint="is that a Reef server? give --url") from error
