"""Payload rows: written as deltas against an earlier payload, read back through their ancestors.

The writer keeps the latest exchanges whole in memory (`Recall`), so that a turn's delta costs no read; a miss reads the base
from the database. Which payload serves as base is a matter of size only and never of meaning.
"""

import sqlite3
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from reef_cli.core.types import Inference
from reef_cli.experience.delta import MIN_SAVING, Delta, encode, resolve
from reef_cli.experience.payload import Payload, decode

MAX_HOPS = 512
"""Longest chain of bases; a 400-turn session reads its last turn in milliseconds, and nothing grows without bound."""
RECALL_BYTES = 8 << 20
_SHARED = 128
"""A base must share this many bytes at one end of one text; less would save next to nothing, and is quickly seen."""
_COLUMNS = ("body", "talk", "ids")
OFTEN_NULL = ("base", "talk", "ids", "logprobs", "mask")
COLUMNS = (
    "seq, base, hops, meta, body, body_head, body_tail, body_size, talk, talk_head, talk_tail, talk_size,"
    " ids, ids_head, ids_tail, ids_size, logprobs, mask"
)
_SELECT = "seq, base, hops, meta, " + ", ".join(f"{c}, {c}_head, {c}_tail, {c}_size" for c in _COLUMNS) + ", logprobs, mask"
_ANCESTORS = f"""
    WITH RECURSIVE up (seq) AS (
        SELECT ? UNION ALL SELECT p.base FROM payloads p JOIN up ON p.seq = up.seq WHERE p.base IS NOT NULL
    ) SELECT {_SELECT} FROM payloads WHERE seq IN (SELECT seq FROM up)"""


@dataclass(slots=True)
class Texts:
    """The three texts of an exchange, whole, and how many bases lie under its row."""

    body: bytes
    talk: bytes
    ids: bytes
    hops: int


@dataclass(slots=True)
class Recent(Texts):
    """A lately written exchange: what the next turn of its conversation is compared with. `weight` is its bytes in memory."""

    seq: int
    messages: Sequence[Mapping[str, Any]]
    links: Sequence[int]
    weight: int


def recent(seq: int, payload: Payload, hops: int, messages: Sequence[Mapping[str, Any]], links: Sequence[int]) -> Recent:
    """An exchange as it is kept in memory; parsed messages take about thrice their text."""
    body, talk, ids = payload.body, payload.talk, payload.ids
    return Recent(body, talk, ids, hops, seq, messages, links, 4 * len(body) + len(talk) + len(ids) + 1000)


class Recall:
    """Recent exchanges by sequence, least recently used out first, bounded by bytes."""

    def __init__(self, limit: int = RECALL_BYTES) -> None:
        self._limit = limit
        self._held = 0
        self._entries: OrderedDict[int, Recent] = OrderedDict()

    def get(self, seq: int | None) -> Recent | None:
        entry = self._entries.get(seq) if seq is not None else None
        if entry is not None:
            self._entries.move_to_end(entry.seq)
        return entry

    def put(self, entry: Recent) -> None:
        if entry.seq in self._entries:
            self.drop(entry.seq)
        self._entries[entry.seq] = entry
        self._held += entry.weight
        while self._held > self._limit and len(self._entries) > 1:
            self._held -= self._entries.popitem(last=False)[1].weight

    def drop(self, seq: int) -> None:
        """Forget an exchange whose payload is going."""
        if (entry := self._entries.pop(seq, None)) is not None:
            self._held -= entry.weight

    def clear(self) -> None:
        self._entries.clear()
        self._held = 0


class Reader:
    """Reads payloads on one connection, keeping rows it met: the turns of one conversation share their ancestors."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._rows: dict[int, dict[str, Any]] = {}

    def _row(self, seq: int) -> dict[str, Any] | None:
        if seq not in self._rows:
            cursor = self._connection.execute(_ANCESTORS, (seq,))
            names = [column[0] for column in cursor.description]
            for values in cursor:
                self._rows[values[0]] = dict(zip(names, values, strict=True))
        return self._rows.get(seq)

    def _text(self, seq: int, column: str) -> bytes:
        chain: dict[int, tuple[int | None, Delta]] = {}
        at: int | None = seq
        while at is not None:
            row = self._rows[at]
            delta = Delta(row[f"{column}_head"], row[f"{column}_tail"], row[column] or b"", row[f"{column}_size"])
            chain[at] = (row["base"], delta)
            at = row["base"]
        return resolve(chain, seq)

    def meta(self, seq: int) -> bytes | None:
        """The JSON part of a payload, or None when there is none."""
        row = self._connection.execute("SELECT meta FROM payloads WHERE seq = ?", (seq,)).fetchone()
        return None if row is None else row[0]

    def texts(self, seq: int) -> Texts | None:
        """The whole texts of a payload, or None when it is gone."""
        row = self._row(seq)
        if row is None:
            return None
        body, talk, ids = (self._text(seq, column) for column in _COLUMNS)
        return Texts(body, talk, ids, row["hops"])

    def inference(self, seq: int, record_id: str, scenario: str, created_at: float) -> Inference | None:
        """The record of a payload, or None when it was evicted."""
        texts = self.texts(seq)
        if texts is None:
            return None
        row = self._rows[seq]
        return decode(
            record_id,
            scenario,
            created_at,
            row["meta"],
            texts.body,
            texts.talk,
            texts.ids,
            row["logprobs"] or b"",
            row["mask"] or b"",
        )


class Plan(NamedTuple):
    """How a payload will be stored: against which base, and as which deltas of body, talk and ids, in how many bytes."""

    base: int
    hops: int
    deltas: tuple[Delta, Delta, Delta]
    cost: int


def _akin(payload: Payload, texts: Texts) -> bool:
    for mine, base in ((payload.body, texts.body), (payload.talk, texts.talk), (payload.ids, texts.ids)):
        if mine and (mine[:_SHARED] == base[:_SHARED] or mine[-_SHARED:] == base[-_SHARED:]):
            return True
    return False


def _against(payload: Payload, base: int, texts: Texts) -> Plan:
    body, talk, ids = encode(payload.body, texts.body), encode(payload.talk, texts.talk), encode(payload.ids, texts.ids)
    return Plan(base, texts.hops + 1, (body, talk, ids), len(body.data) + len(talk.data) + len(ids.data))


def plan(payload: Payload, candidates: Iterable[tuple[int, Texts]]) -> Plan | None:
    """The cheapest way to store a payload, None for alone; the first candidate that shares half of it is taken at once."""
    cost = len(payload.body) + len(payload.talk) + len(payload.ids)
    best: Plan | None = None
    least = cost - MIN_SAVING
    for seq, texts in candidates:
        if texts.hops >= MAX_HOPS or not _akin(payload, texts):
            continue
        found = _against(payload, seq, texts)
        if found.cost <= least:
            best, least = found, found.cost
            if found.cost * 2 < cost:
                break
    return best


def row_of(seq: int, payload: Payload, stored: Plan | None) -> tuple[object, ...]:
    """The row of a payload in the order of `COLUMNS`, with 0 for the NULL of those that often are."""
    meta, body, talk, ids, logprobs, mask, *_ = payload
    if stored is None:
        return (
            seq, 0, 0, meta, body, 0, 0, len(body), talk or 0, 0, 0, len(talk), ids or 0, 0, 0, len(ids),
            logprobs or 0, mask or 0,
        )  # fmt: skip
    one, two, three = stored.deltas
    return (
        seq, stored.base, stored.hops, meta, one.data, one.head, one.tail, one.size,
        two.data or 0, two.head, two.tail, two.size, three.data or 0, three.head, three.tail, three.size,
        logprobs or 0, mask or 0,
    )  # fmt: skip


def write_note(connection: sqlite3.Connection, seq: int, meta: bytes) -> None:
    """Insert the payload of a report or an instruction: JSON alone."""
    connection.execute("INSERT INTO payloads (seq, meta) VALUES (?, ?)", (seq, meta))
