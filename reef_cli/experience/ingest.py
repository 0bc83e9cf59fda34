"""How exchanges enter the database: encoded, placed in their session, stored as a delta. Runs on the writer's thread only.

Everything that can refuse a record comes before the first insert, so a refused record leaves no trace and needs no savepoint;
what can fail after that is the disk, which rolls back the whole batch. Rows wait for the end of the transaction, or for the
first that may look for them (`settle`). Memory held between transactions is only a cache.
"""

import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from reef_cli.core.errors import ContentConflict
from reef_cli.core.types import Inference
from reef_cli.experience import bodies
from reef_cli.experience.chain import answer_link, links
from reef_cli.experience.codec import checked_id, dumps
from reef_cli.experience.eligibility import trainable_tokens
from reef_cli.experience.held import Held, Lately
from reef_cli.experience.model import Role, Scenario
from reef_cli.experience.payload import Payload, encode
from reef_cli.experience.placing import Place, Placing, Session, with_tools
from reef_cli.experience.schema import COUNTERS
from reef_cli.experience.side import classify, has_tools, summary_of

_IDENTITY = (
    "SELECT r.digest, s.name FROM records r JOIN scenarios s ON s.id = r.scenario_id WHERE r.id = ? AND s.archived_at IS NULL"
)
_RECORD = (
    "seq, id, scenario_id, created_at, digest, session_id, parent, chain, next, body_hash, role, retry_of,"
    " dialect, model, release_id, weight_version, summary, complete, finish, error, prompt_tokens, output_tokens,"
    " trainable_tokens, stored_bytes, kind"
)
_SESSION = "id, scenario_id, key, source, tools, started_at, last_at, turns, output_tokens, trainable_tokens, summary, records"
_SESSION_AGAIN = (
    "UPDATE sessions SET tools = ?, last_at = max(last_at, ?), records = records + 1, turns = turns + ?,"
    " output_tokens = output_tokens + ?, trainable_tokens = trainable_tokens + ? WHERE id = ?"
)


class _Facts(NamedTuple):
    """What the row of an exchange says besides its own fields."""

    tools: bool
    role: Role
    link: int | None
    following: int | None
    summary: str
    prompt: int
    output: int
    trainable: int


class Ingest:
    """The writer's working memory and the statements that store exchanges."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection
        self.placing = Placing(connection, self.settle)
        self._sessions = Held("sessions", _SESSION, "1")
        self._payloads = Held("payloads", bodies.COLUMNS)
        self._records = Held("records", _RECORD, "'inference'")
        self._links: set[int] = set()
        self._known = Lately()
        self._recall = bodies.Recall()
        self._tips: dict[tuple[int, str, int], int] = {}
        self._templates: dict[tuple[int, str], int] = {}
        self._tally: Counter[tuple[int, str]] = Counter()
        self._next = self._next_session = 0
        self.reset()

    def reset(self) -> None:
        """Forget everything that a rolled back transaction may have made untrue."""
        self.placing.forget()
        self._recall.clear()
        self._tips.clear()
        self._templates.clear()
        self._tally.clear()
        for held in (self._sessions, self._payloads, self._records):
            held.clear()
        self._links.clear()
        self._next = max(self._next, (self._greatest("records", "seq") or 0) + 1)
        self._next_session = max(self._next_session, (self._greatest("sessions", "id") or 0) + 1)
        self._known.reset(self._greatest("records", "id") or "")

    def _greatest(self, table: str, column: str) -> Any:
        """One seek in an index; None for an empty table."""
        return self.connection.execute(f"SELECT max({column}) FROM {table}").fetchone()[0]

    def mark(self) -> Counter[tuple[int, str]]:
        """What `undo` needs to go back to now."""
        return self._tally.copy()

    def undo(self, mark: Counter[tuple[int, str]]) -> None:
        """Follow a savepoint that was rolled back: counts as they were at `mark`, caches empty."""
        self.reset()
        self._tally = mark

    def forget(self, seq: int) -> None:
        """A payload goes: nothing may be built on it any more."""
        self._recall.drop(seq)

    def sequence(self) -> int:
        """The next record's place in the order of all experience."""
        taken = self._next
        self._next += 1
        return taken

    def tally(self, scenario: int, counter: str, amount: int = 1) -> None:
        """Count something for the scenario's row; written once per transaction."""
        self._tally[scenario, counter] += amount

    def settle(self) -> None:
        """Write the rows held back."""
        if self._records:
            for held in (self._sessions, self._payloads, self._records):
                held.insert(self.connection)
            self._links.clear()

    def flush(self) -> None:
        """Write the rows held back and the counters; the last thing before a commit."""
        self.settle()
        for row in {row for row, _ in self._tally}:
            changes = [self._tally[row, name] for name in COUNTERS]
            terms = ", ".join(f"{name} = {name} + ?" for name in COUNTERS)
            self.connection.execute(f"UPDATE scenarios SET {terms} WHERE id = ?", (*changes, row))
        self._tally.clear()

    def known(self, record_id: str, scenario: str, digest: bytes) -> bool:
        """Whether this very record is stored. Raises `ContentConflict` when the id belongs to another one."""
        self.settle()
        self._known.add(record_id)
        row = self.connection.execute(_IDENTITY, (record_id,)).fetchone()
        if row is None:
            return False
        if row[1] != scenario:
            raise ContentConflict(f"record id {record_id} is taken in another scenario", hint="use a fresh id")
        if row[0] != digest:
            raise ContentConflict(
                f"record id {record_id} is taken by other content", hint="send the same content, or use a fresh id"
            )
        return True

    def append(self, record: Inference, scenario: Scenario) -> bool:
        """Store an exchange; False when it is there already. Raises `ContentConflict`, `InvalidRequest`."""
        checked_id(record.id)
        payload = encode(record)
        if self._known.maybe(record.id) and self.known(record.id, record.scenario, payload.digest):
            return False
        self._known.add(record.id)
        opening = _opening(scenario.row, record)
        tip = self._recall.get(self._tips.get(opening))
        chain = links(record.messages, scenario.row, tip.messages if tip else (), tip.links if tip else ())
        if not self._links.isdisjoint(chain):
            self.settle()
        place = self.placing.place(scenario.row, record, chain, payload.body_hash)
        facts = _facts(record, payload, place, chain)
        template = (scenario.row, record.dialect)
        stored = bodies.plan(payload, self._bases(place, tip, template))

        seq = self.sequence()
        row, size = bodies.row_of(seq, payload, stored)
        self._hold_record(seq, record, payload, scenario.row, place, facts, size)
        self._payloads.add(row)
        texts = bodies.Texts(payload.body, payload.talk, payload.ids, stored.hops)
        self._recall.put(bodies.Recent(seq, texts, record.messages, chain))
        if stored.base is None:
            self._templates[template] = seq
        if len(self._tips) > 8192:
            self._tips.clear()
        self._tips[opening] = seq
        return True

    def _bases(self, place: Place, tip: bodies.Recent | None, template: tuple[int, str]) -> Iterator[tuple[int, bodies.Texts]]:
        """What the exchange may share its bytes with, likeliest first."""
        for seq in dict.fromkeys((place.retry_of, place.parent, tip.seq if tip else None, self._templates.get(template))):
            if seq is None:
                continue
            recent = self._recall.get(seq)
            texts = recent.texts if recent is not None else bodies.Reader(self.connection).texts(seq)
            if texts is not None:
                yield seq, texts

    def _hold_record(
        self, seq: int, record: Inference, payload: Payload, scenario: int, place: Place, facts: _Facts, size: int
    ) -> None:
        session = self._write_session(scenario, record, place.session, facts)
        row = (
            *(seq, record.id, scenario, record.created_at, payload.digest, session, place.parent),
            *(facts.link, facts.following, payload.body_hash, facts.role, place.retry_of, record.dialect, record.model),
            *(record.release_id, record.weight_version, facts.summary, record.complete, record.finish, record.error),
            *(facts.prompt, facts.output, facts.trainable, size),
        )
        self._records.add(row)
        self._links.update(link for link in (facts.link, facts.following) if link is not None)
        self.tally(scenario, "inferences")
        self.tally(scenario, "incomplete", not record.complete)
        self.tally(scenario, "stored_bytes", size)
        self.tally(scenario, "naive_bytes", payload.size)

    def _write_session(self, scenario: int, record: Inference, session: Session, facts: _Facts) -> int:
        if facts.tools and not session.tools:
            session = with_tools(session)
        turn, at = facts.role == "turn", record.created_at
        if session.row is not None:
            if self._sessions:
                self.settle()  # the session's own row may be among those held back
            self.connection.execute(_SESSION_AGAIN, (session.tools, at, turn, facts.output, facts.trainable, session.row))
            self.placing.remember(scenario, session)
            return session.row
        row = self._next_session
        self._next_session += 1
        self._sessions.add(
            (
                *(row, scenario, session.key, session.source, session.tools, at, at, turn),
                *(facts.output, facts.trainable, facts.summary),
            )
        )
        self.placing.remember(scenario, Session(row, session.key, session.source, session.tools))
        return row


def _opening(scenario: int, record: Inference) -> tuple[int, str, int]:
    """What the turns of one conversation share from the first on. A guess, so the ends of the text will do."""
    text = dumps(record.messages[:2])
    return scenario, record.session or record.tags.get("session") or "", hash((len(text), text[:512], text[-512:]))


def _facts(record: Inference, payload: Payload, place: Place, chain: Sequence[int]) -> _Facts:
    """Everything about an exchange that its row says and that could fail to be worked out."""
    tools = has_tools(record.request, payload.span)
    role = classify(record.messages, tools=tools, session_tools=place.session.tools, tags=record.tags)
    link = chain[-1] if chain else None
    prompt, output, trainable = _token_counts(record)
    return _Facts(
        tools=tools,
        role="retry" if place.retry_of is not None else role,
        link=link,
        following=answer_link(link, record.response) if link is not None else None,
        summary=summary_of(record.messages),
        prompt=prompt,
        output=output,
        trainable=trainable,
    )


def _token_counts(record: Inference) -> tuple[int, int, int]:
    """Prompt, output and trainable tokens; from the provider's usage when there are no tokens."""
    if record.tokens is not None:
        return len(record.tokens.prompt_ids), len(record.tokens.output_ids), trainable_tokens(record)
    return _usage(record, "prompt_tokens", "input_tokens"), _usage(record, "completion_tokens", "output_tokens"), 0


def _usage(record: Inference, *names: str) -> int:
    for name in names:
        value = record.usage.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return min(max(value, 0), 2**53)
    return 0
