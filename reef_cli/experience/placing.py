"""Where an exchange belongs: its session, the record it continues, and whether it is a retry.

Runs on the writer's connection. A session named by the client holds everything sent under that name; otherwise an exchange
joins the session of the record whose messages (and answer) its own messages continue, and begins a session when there is none.
Each lookup is one index seek (past newer records with the same messages where the answer is given as well); a turn of a running
conversation needs one, and what a group of records begins with is looked up at once.
"""

import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

from reef_cli.core.types import Inference
from reef_cli.experience.chain import Message, continuation_points, role_of
from reef_cli.experience.held import MOST

RETRY_S = 10.0
"""The same body in the same session within this time is a client trying again."""
_FOUND = (
    "SELECT r.seq, r.session_id, r.created_at, r.complete, r.body_hash, s.key FROM records r"
    " JOIN sessions s ON s.id = r.session_id WHERE r.chain = ?"
)
_FIND = {
    (
        answered,
        named,
    ): f"{_FOUND}{' AND r.next = ?' if answered else ''} AND {where} ORDER BY r.session_id DESC, r.seq DESC LIMIT 1"
    for answered in (False, True)
    for named, where in ((False, "s.source = 'prefix'"), (True, "r.session_id = ?"))
}
"""The newest record by whether its answer is given as well, and whether the session is."""


@dataclass(slots=True)
class Session:
    """A session as the writer knows it; `row` is None until its first record is written. Changes with what is stored in it."""

    row: int | None
    key: str
    source: Literal["tag", "prefix"]
    tools: bool


class Place(NamedTuple):
    """Where a record goes."""

    session: Session
    parent: int | None
    retry_of: int | None


class _Found(NamedTuple):
    seq: int
    session_id: int
    created_at: float
    complete: bool
    body_hash: int
    key: str


class Placing:
    """Finds places; caches sessions until `forget`. `settle` is called before a look at rows that may still be held back."""

    def __init__(self, connection: sqlite3.Connection, settle: Callable[[], None] = lambda: None) -> None:
        self._connection = connection
        self._settle = settle
        self._sessions: dict[tuple[int, str], Session] = {}

    def forget(self) -> None:
        """Drop what a rolled back transaction may have left here."""
        self._sessions.clear()

    def remember(self, scenario: int, session: Session) -> None:
        if len(self._sessions) >= 4096:
            self._sessions.clear()
        self._sessions[scenario, session.key] = session

    def session(self, scenario: int, key: str) -> Session | None:
        """The session of that name, if it has records."""
        if (held := self._sessions.get((scenario, key))) is not None:
            return held
        self._settle()
        row = self._connection.execute(
            "SELECT id, key, source, tools FROM sessions WHERE scenario_id = ? AND key = ?", (scenario, key)
        ).fetchone()
        if row is None:
            return None
        found = Session(row[0], row[1], row[2], bool(row[3]))
        self.remember(scenario, found)
        return found

    def seen(self, links: Sequence[int]) -> set[int]:
        """Those of the links that stand for the messages of a stored record."""
        found: set[int] = set()
        for start in range(0, len(links), MOST):
            part = links[start : start + MOST]
            found.update(row[0] for row in self._connection.execute(_seen(len(part)), part))
        return found

    def place(self, scenario: int, record: Inference, links: Sequence[int], body_hash: int, new: bool = False) -> Place:
        """The place of a record among those stored before it. `links` is its messages' chain; `new` says that none of them
        has the same messages."""
        named = record.session or record.tags.get("session")
        if named is None:
            return self._by_prefix(scenario, record, links, body_hash, new)
        session = self.session(scenario, named) or Session(None, named, "tag", False)
        if session.row is None:
            return Place(session, None, None)
        parent = self._continued(record.messages, links, session.row)
        again = None if new else self._same(links, session.row)
        retry = again.seq if again is not None and _retried(again, record, body_hash) else None
        return Place(session, parent.seq if parent else None, retry)

    def _by_prefix(self, scenario: int, record: Inference, links: Sequence[int], body_hash: int, new: bool) -> Place:
        parent = self._continued(record.messages, links, None) if len(links) > 1 else None
        again = None if new else self._same(links, None)
        # Equal first requests of different users are no retries; an unanswered one that comes again is.
        if again is not None and (again.complete or not _retried(again, record, body_hash)):
            again = None
        home = parent or again
        session = self.session(scenario, home.key) if home is not None else None
        if session is None:
            session = Session(None, record.id, "prefix", False)
        return Place(session, parent.seq if parent else None, again.seq if again else None)

    def conversation(self, messages: Sequence[Message], links: Sequence[int]) -> str | None:
        """The key of the unnamed session that a request with these messages continues; None when it begins one."""
        parent = self._continued(messages, links, None)
        return parent.key if parent is not None else None

    def _continued(self, messages: Sequence[Message], links: Sequence[int], session: int | None) -> _Found | None:
        for count in continuation_points(messages):
            answered = role_of(messages[count]) == "assistant"
            found = self._find(session, links[count - 1], links[count]) if answered else None
            if found := found or self._find(session, links[count - 1]):
                return found
        return None

    def _same(self, links: Sequence[int], session: int | None) -> _Found | None:
        return self._find(session, links[-1]) if links else None

    def _find(self, session: int | None, asked: int, answered: int | None = None) -> _Found | None:
        """The newest record with those links in the session, or in any session that no client named."""
        parameters = [link for link in (asked, answered, session) if link is not None]
        row = self._connection.execute(_FIND[answered is not None, session is not None], parameters).fetchone()
        return None if row is None else _Found(*row)


def _retried(earlier: _Found, record: Inference, body_hash: int) -> bool:
    """Whether `record` is the earlier request tried again: same bytes, or the same messages after a failure."""
    recent = abs(record.created_at - earlier.created_at) <= RETRY_S
    return recent and (earlier.body_hash == body_hash or not earlier.complete)


@cache
def _seen(count: int) -> str:
    """One statement for so many links: a group of records comes with a look-up each."""
    rows = ", ".join(["(?)"] * count)
    return f"SELECT column1 FROM (VALUES {rows}) WHERE EXISTS (SELECT 1 FROM records WHERE chain = column1)"
