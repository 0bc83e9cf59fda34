"""How exchanges enter the database: encoded, placed in their session, stored as a delta. Runs on the writer's thread only.

Everything that can refuse a record is done as it comes, so a refused record leaves no trace and needs no savepoint; what can
fail after that is the disk, which rolls back the whole batch. Accepted records wait for the end of the transaction, or for the
first that may look for them (`settle`), and are placed and written together. Memory held between transactions is only a cache.
"""

import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from reef_cli.core.errors import ContentConflict
from reef_cli.core.types import Inference
from reef_cli.experience import bodies
from reef_cli.experience.chain import Message, answer_link, links
from reef_cli.experience.codec import checked_id, dumps
from reef_cli.experience.eligibility import trainable_tokens
from reef_cli.experience.held import OR_NULL, Held, Lately
from reef_cli.experience.model import Role, Scenario
from reef_cli.experience.payload import Payload, encode
from reef_cli.experience.placing import Place, Placing, Session
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
_MOST_TOLD = 2**53
_ENDS = 128
_OFTEN_NULL = ("parent", "retry_of", "release_id", "weight_version", "error")
_SESSION = "id, scenario_id, key, source, tools, started_at, last_at, turns, output_tokens, trainable_tokens, summary, records"
_SESSION_AGAIN = (
    "UPDATE sessions SET tools = ?, last_at = max(last_at, ?), records = records + 1, turns = turns + ?,"
    " output_tokens = output_tokens + ?, trainable_tokens = trainable_tokens + ? WHERE id = ?"
)


_COUNTER = {name: place for place, name in enumerate(COUNTERS)}
_INFERENCES, _INCOMPLETE = _COUNTER["inferences"], _COUNTER["incomplete"]
_STORED_BYTES, _NAIVE_BYTES = _COUNTER["stored_bytes"], _COUNTER["naive_bytes"]
_COUNT = f"UPDATE scenarios SET {', '.join(f'{name} = {name} + ?' for name in COUNTERS)} WHERE id = ?"


@dataclass(slots=True)
class _Exchange:
    """An accepted record on its way to its place, with all that its row says and that could fail to be worked out.

    `role` is None for a turn that may be side traffic of its session.
    """

    record: Inference
    scenario: int
    payload: Payload
    opening: int
    chain: list[int]
    following: int | None
    tools: bool
    role: Role | None
    summary: str
    prompt: int
    output: int
    trainable: int


class Ingest:
    """The writer's working memory and the statements that store exchanges."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection
        self.placing = Placing(connection, self.settle)
        self._sessions = Held("sessions", _SESSION, records="1")
        self._payloads = Held("payloads", bodies.COLUMNS, **dict.fromkeys(bodies.OFTEN_NULL, OR_NULL))
        self._records = Held("records", _RECORD, kind="'inference'", **dict.fromkeys(_OFTEN_NULL, OR_NULL))
        self._waiting: list[_Exchange] = []
        self._links: set[int] = set()
        """Links that later records may look for among those that wait."""
        self._known = Lately()
        self._recall = bodies.Recall()
        self._tips: dict[int, int] = {}
        self._templates: dict[tuple[int, str], int] = {}
        self._tally: dict[int, list[int]] = {}
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
        self._waiting.clear()
        self._links.clear()
        self._next = max(self._next, (self._greatest("records", "seq") or 0) + 1)
        self._next_session = max(self._next_session, (self._greatest("sessions", "id") or 0) + 1)
        self._known.reset(self._greatest("records", "id") or "")

    def _greatest(self, table: str, column: str) -> Any:
        """One seek in an index; None for an empty table."""
        return self.connection.execute(f"SELECT max({column}) FROM {table}").fetchone()[0]

    def mark(self) -> dict[int, list[int]]:
        """What `undo` needs to go back to now."""
        return {scenario: list(counts) for scenario, counts in self._tally.items()}

    def undo(self, mark: dict[int, list[int]]) -> None:
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
        self._counts(scenario)[_COUNTER[counter]] += amount

    def _counts(self, scenario: int) -> list[int]:
        if (counts := self._tally.get(scenario)) is None:
            counts = self._tally[scenario] = [0] * len(COUNTERS)
        return counts

    def settle(self) -> None:
        """Place the records that wait and write their rows."""
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            self._links.clear()
            try:
                self._place_all(waiting)
            except Exception:
                # They were accepted: the transaction must not end without them, whoever takes this error for its own.
                self._waiting = waiting
                raise
        self._insert()

    def _place_all(self, waiting: Sequence[_Exchange]) -> None:
        ends = [exchange.chain[-1] for exchange in waiting if exchange.chain]
        # One alone is asked for as it is placed.
        seen = self.placing.seen(ends) if len(ends) > 1 else ends
        for exchange in waiting:
            self._place(exchange, new=not exchange.chain or exchange.chain[-1] not in seen)

    def _insert(self) -> None:
        """Write the rows held back."""
        if self._records:
            for held in (self._sessions, self._payloads, self._records):
                held.insert(self.connection)

    def flush(self) -> None:
        """Write the rows held back and the counters; the last thing before a commit."""
        self.settle()
        for scenario, counts in self._tally.items():
            self.connection.execute(_COUNT, (*counts, scenario))
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
        exchange = self._accepted(record, scenario.row, payload)
        if not self._links.isdisjoint(exchange.chain):
            self.settle()
        if exchange.chain:
            self._links.add(exchange.chain[-1])
        if exchange.following is not None:
            self._links.add(exchange.following)
        self._waiting.append(exchange)
        return True

    def _accepted(self, record: Inference, scenario: int, payload: Payload) -> _Exchange:
        messages = record.messages
        opening = _opening(scenario, record)
        tip = self._recall.get(self._tips.get(opening))
        chain = links(messages, scenario, tip.messages, tip.links) if tip is not None else links(messages, scenario)
        following = answer_link(chain[-1], record.response) if chain else None
        tools = has_tools(record.request, payload.span)
        role = classify(messages, tools=tools, tags=record.tags)
        summary = summary_of(messages)
        prompt, output, trainable = _token_counts(record)
        return _Exchange(record, scenario, payload, opening, chain, following, tools, role, summary, prompt, output, trainable)

    def _place(self, exchange: _Exchange, new: bool) -> None:
        record, scenario, payload, chain = exchange.record, exchange.scenario, exchange.payload, exchange.chain
        place = self.placing.place(scenario, record, chain, payload.body_hash, new)
        template = (scenario, record.dialect)
        stored = bodies.plan(payload, self._bases(place, self._recall.get(self._tips.get(exchange.opening)), template))

        seq = self.sequence()
        own = len(payload.meta) + len(payload.logprobs) + len(payload.mask)
        naive = own + len(payload.body) + len(payload.talk) + len(payload.ids)
        size = naive if stored is None else own + stored.cost
        self._hold_record(seq, exchange, place, size)
        self._payloads.add(bodies.row_of(seq, payload, stored))
        counts = self._counts(scenario)
        counts[_INFERENCES] += 1
        counts[_INCOMPLETE] += not record.complete
        counts[_STORED_BYTES] += size
        counts[_NAIVE_BYTES] += naive

        self._recall.put(bodies.recent(seq, payload, stored.hops if stored else 0, record.messages, chain))
        if stored is None:
            self._templates[template] = seq
        if len(self._tips) > 8192:
            self._tips.clear()
        self._tips[exchange.opening] = seq

    def _bases(self, place: Place, tip: bodies.Recent | None, template: tuple[int, str]) -> Iterator[tuple[int, bodies.Texts]]:
        """What the exchange may share its bytes with, likeliest first."""
        for seq in dict.fromkeys((place.retry_of, place.parent, tip.seq if tip else None, self._templates.get(template))):
            if seq is None:
                continue
            texts = self._recall.get(seq) or bodies.Reader(self.connection).texts(seq)
            if texts is not None:
                yield seq, texts

    def _hold_record(self, seq: int, exchange: _Exchange, place: Place, size: int) -> None:
        record, payload, chain = exchange.record, exchange.payload, exchange.chain
        session, parent, retry = place
        role: Role = "retry" if retry is not None else exchange.role or ("side" if session.tools else "turn")
        home = self._write_session(exchange, session, 1 if role == "turn" else 0)
        self._records.add((
            seq, record.id, exchange.scenario, record.created_at, payload.digest, home, parent or 0,
            chain[-1] if chain else None, exchange.following, payload.body_hash, role, retry or 0, record.dialect,
            record.model, 0 if record.release_id is None else record.release_id,
            0 if record.weight_version is None else record.weight_version, exchange.summary, 1 if record.complete else 0,
            record.finish, 0 if record.error is None else record.error, exchange.prompt, exchange.output,
            exchange.trainable, size,
        ))  # fmt: skip

    def _write_session(self, exchange: _Exchange, session: Session, turn: int) -> int:
        at, output, trainable = exchange.record.created_at, exchange.output, exchange.trainable
        session.tools = session.tools or exchange.tools
        tools = 1 if session.tools else 0
        if session.row is not None:
            if self._sessions:
                self._insert()  # the session's own row may be among those held back
            self.connection.execute(_SESSION_AGAIN, (tools, at, turn, output, trainable, session.row))
            return session.row
        row = session.row = self._next_session
        self._next_session += 1
        self._sessions.add((
            row, exchange.scenario, session.key, session.source, tools, at, at, turn, output, trainable, exchange.summary,
        ))  # fmt: skip
        self.placing.remember(exchange.scenario, session)
        return row


def _opening(scenario: int, record: Inference) -> int:
    """What the turns of one conversation share from the first on. A guess, so a hash of the ends of the texts will do."""
    return hash((scenario, record.session or record.tags.get("session"), *map(_ends, record.messages[:2])))


def _ends(message: Message) -> tuple[int, Any, Any]:
    text = message.get("content")
    if not isinstance(text, str):
        text = dumps(text)
    return len(text), text[:_ENDS], text[-_ENDS:]


def _token_counts(record: Inference) -> tuple[int, int, int]:
    """Prompt, output and trainable tokens; from the provider's usage when there are no tokens."""
    if record.tokens is not None:
        return len(record.tokens.prompt_ids), len(record.tokens.output_ids), trainable_tokens(record)
    usage = record.usage
    prompt, output = usage.get("prompt_tokens"), usage.get("completion_tokens")
    if type(prompt) is not int:
        prompt = usage.get("input_tokens")
    if type(output) is not int:
        output = usage.get("output_tokens")
    return _count(prompt), _count(output), 0


def _count(told: Any) -> int:
    """A provider's word for a number; it may be anything."""
    if type(told) is not int:
        return 0
    return told if 0 <= told <= _MOST_TOLD else min(max(told, 0), _MOST_TOLD)
