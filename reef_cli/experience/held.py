"""What the writer remembers so as to ask the database less: rows held back within a transaction, and ids lately used.

Each statement hands the interpreter over and takes it back, which under load costs more than the statement; so one inserts many
rows, and an id that cannot be stored yet is not looked up. Knows no table.
"""

import sqlite3
from collections import deque
from collections.abc import Sequence
from itertools import chain

OR_NULL = "nullif(?, 0)"
"""Stands for a column that is often NULL, of a row that has 0 instead: None takes six times as long to bind as a number."""
MOST = 16
"""Rows of one statement; every count is a prepared statement of its own."""


class Held:
    """Rows for one table. `columns` are the names, comma separated; `marks` say how one is given in SQL, if not as it is.

    A column whose mark has no `?` is left out of the rows.
    """

    def __init__(self, table: str, columns: str, **marks: str) -> None:
        self._head = f"INSERT INTO {table} ({columns}) VALUES "
        self._row = f"({', '.join(marks.get(name, '?') for name in columns.split(', '))})"
        self._statements: dict[int, str] = {}
        self._rows: list[Sequence[object]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, row: Sequence[object]) -> None:
        self._rows.append(row)

    def clear(self) -> None:
        self._rows.clear()

    def insert(self, connection: sqlite3.Connection) -> None:
        """Write what is held, in order, and hold it no more."""
        rows, self._rows = self._rows, []
        for start in range(0, len(rows), MOST):
            part = rows[start : start + MOST]
            connection.execute(self._statement(len(part)), tuple(chain.from_iterable(part)))

    def _statement(self, count: int) -> str:
        if count not in self._statements:
            self._statements[count] = self._head + ", ".join([self._row] * count)
        return self._statements[count]


class Lately:
    """Which ids may be stored. Ids grow with time, so nearly every new one is greater than all but those of late."""

    def __init__(self, most: int = 4096) -> None:
        self._most = most
        self._greatest = ""
        self._ids: set[str] = set()
        self._order: deque[str] = deque()

    def reset(self, greatest: str) -> None:
        """Begin anew; `greatest` is the greatest id stored."""
        self._greatest = greatest
        self._ids.clear()
        self._order.clear()

    def maybe(self, record_id: str) -> bool:
        """False only when the id is surely new."""
        return record_id <= self._greatest or record_id in self._ids

    def add(self, record_id: str) -> None:
        """The id is, or may be, stored from now on."""
        if record_id in self._ids:
            return
        self._ids.add(record_id)
        self._order.append(record_id)
        if len(self._order) > self._most:
            oldest = self._order.popleft()
            self._ids.remove(oldest)
            self._greatest = max(self._greatest, oldest)
