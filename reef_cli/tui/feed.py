"""Where snapshots come from: two threads, one that listens to `/reef/events`, one that fetches what changed.

The listener only says what kind of thing happened; the fetcher then asks for the status, and for releases or the records after
the last sequence it has, at most four times a second however many events come. Without events it asks for the status every two
seconds. When the server goes away it says so once and tries again, up to every five seconds, until it is back.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from reef_cli.control.client import Client, segment
from reef_cli.core.errors import AuthError, NotFoundError, ReefError, UsageError
from reef_cli.tui.facts import RecordRow, ScenarioRow, Snapshot, record_rows, release_rows, scenario_rows, server_line

REFRESH_S = 0.25
IDLE_S = 2.0
LONGEST_RETRY_S = 5.0
KEEP_RECORDS = 200
_ALL = frozenset({"record", "job", "release"})


@dataclass(frozen=True, slots=True)
class Lost:
    """The server does not answer; the next try comes in `retry_s`."""

    reason: str
    retry_s: float


Update = Snapshot | Lost


class Feed:
    """Snapshots of one server, handed to `on_update` from the fetcher's thread."""

    def __init__(self, url: str, token: str | None, on_update: Callable[[Update], None]) -> None:
        self._client = Client(url, token, timeout_s=10.0)
        self._listener = Client(url, token, timeout_s=10.0)
        self._on_update = on_update
        self._wanted: set[str] = set(_ALL)
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stopped = threading.Event()
        self._select: str | None = None
        self._last = Snapshot()
        self._live = False
        self._threads = [
            threading.Thread(target=target, name=f"reef-tui-{name}", daemon=True)
            for name, target in (("fetch", self._fetch_loop), ("listen", self._listen_loop))
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End both threads; returns once they are gone or are stuck in a call of a second."""
        self._stopped.set()
        self._wake.set()
        self._listener.close()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(timeout=1.0)

    def select(self, scenario: str) -> None:
        """Follow another scenario."""
        with self._lock:
            if scenario == self._select:
                return
            self._select = scenario
        self.poke(*_ALL)

    def poke(self, *kinds: str) -> None:
        """Something of these kinds changed."""
        with self._lock:
            self._wanted.update(kinds or _ALL)
        self._wake.set()

    def _fetch_loop(self) -> None:
        retry_s = 0.5
        while not self._stopped.is_set():
            self._wake.clear()
            with self._lock:
                wanted, self._wanted = self._wanted, set()
            try:
                self._on_update(self._fetch(frozenset(wanted)))
            except ReefError as error:
                self._client.close()
                self.poke_quietly(_ALL)
                self._on_update(Lost(_reason(error), retry_s))
                self._stopped.wait(retry_s)
                retry_s = min(LONGEST_RETRY_S, retry_s * 2)
                continue
            retry_s = 0.5
            self._stopped.wait(REFRESH_S)
            self._wake.wait(IDLE_S)

    def poke_quietly(self, kinds: frozenset[str]) -> None:
        """Remember what must be fetched again without waking the fetcher, which is about to wait."""
        with self._lock:
            self._wanted |= kinds

    def _fetch(self, wanted: frozenset[str]) -> Snapshot:
        status = self._client.get("/reef/status")
        scenarios = scenario_rows(status)
        names = [row.name for row in scenarios]
        with self._lock:
            selected = self._select if self._select in names else (names[0] if names else None)
        last = self._last
        if selected != last.selected:
            last, wanted = Snapshot(selected=selected), _ALL
        if not self._live:
            wanted = _ALL  # nothing tells what changed
        new = replace(last, server=server_line(status, self._client.url), scenarios=scenarios, live=self._live)
        if selected is not None:
            new = self._details(new, selected, wanted | self._moved(scenarios, selected))
        self._last = new
        return new

    def _moved(self, scenarios: tuple[ScenarioRow, ...], selected: str) -> frozenset[str]:
        """A head that differs from the chain we know means that the chain must be read again."""
        known = self._last.head("weights")
        head = next((row.head for row in scenarios if row.name == selected), None)
        return frozenset({"release"}) if known is None or known.release_id != head else frozenset()

    def _details(self, snapshot: Snapshot, selected: str, wanted: frozenset[str]) -> Snapshot:
        base = f"/reef/scenarios/{segment(selected)}"
        try:
            if "release" in wanted:
                snapshot = replace(snapshot, releases=release_rows(self._client.get(f"{base}/releases")))
            if "record" in wanted:
                snapshot = replace(snapshot, records=self._records(base, snapshot.records))
        except NotFoundError:
            return replace(snapshot, releases=(), records=())  # archived between the two calls
        return snapshot

    def _records(self, base: str, known: tuple[RecordRow, ...]) -> tuple[RecordRow, ...]:
        if not known:
            return record_rows(self._client.get(f"{base}/records", order="newest", limit=50))
        fresh = record_rows(self._client.get(f"{base}/records", after_sequence=known[-1].sequence, limit=KEEP_RECORDS))
        return (*known, *fresh)[-KEEP_RECORDS:]

    def _listen_loop(self) -> None:
        cursor: str | None = None
        while not self._stopped.is_set():
            try:
                for event in self._listener.events(cursor):
                    self._live = True
                    cursor = event.cursor or cursor
                    self.poke(*({event.kind} & _ALL or _ALL))
                    if self._stopped.is_set():
                        return
            except UsageError:
                cursor = None  # another database behind the same address: its events begin anew
            except ReefError:
                pass  # the fetcher says what is wrong
            self._live = False
            self._stopped.wait(1.0)


def _reason(error: ReefError) -> str:
    if isinstance(error, AuthError):
        return "the server refuses the token; set REEF_TOKEN"
    return error.message
