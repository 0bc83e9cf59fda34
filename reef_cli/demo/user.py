"""The scripted user: asks questions from a file, scores each answer by the item's grader, and reports the score, or says in
the same conversation what it thinks of the answer and reports nothing.

Several threads ask at once, like people do. They slow down when the server has more scored answers waiting than it can learn
from soon, so that what is learned stays fresh.
"""

import random
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from reef_cli.control.client import Answer, Client
from reef_cli.core.errors import ReefError, UnavailableError
from reef_cli.demo.scenes import Preference
from reef_cli.evaluation.grade import grade_now
from reef_cli.evaluation.suite import Item


@dataclass(frozen=True, slots=True)
class Style:
    """How the user asks."""

    threads: int
    max_tokens: int
    temperature: float
    backlog: int
    """Reported answers that may wait before the user pauses."""
    says: Preference | None = None
    """What is said in place of a report."""


class User:
    """Runs until stopped. `scores` holds the last rewards, newest last."""

    def __init__(self, scenario: str, items: Sequence[Item], style: Style, connect: Callable[[], Client], seed: int) -> None:
        self._scenario = scenario
        self._items = list(items)
        self._style = style
        self._connect = connect
        self._stop = threading.Event()
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._order: list[Item] = []
        self.waiting = 0
        self.asked = 0
        self.scores: deque[float] = deque(maxlen=64)
        self.fault: ReefError | None = None
        self._threads = [threading.Thread(target=self._talk, name=f"user-{n}", daemon=True) for n in range(style.threads)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    @property
    def recent(self) -> float:
        """Mean of the last rewards."""
        return sum(self.scores) / len(self.scores) if self.scores else 0.0

    def _next(self) -> tuple[Item, int]:
        """The next question of a shuffled pass over all of them, and a seed for its answer."""
        with self._lock:
            if not self._order:
                self._order = self._items[:]
                self._random.shuffle(self._order)
            return self._order.pop(), self._random.getrandbits(31)

    def _talk(self) -> None:
        client = self._connect()
        while not self._stop.is_set():
            if self.waiting >= self._style.backlog:
                time.sleep(0.2)
                continue
            try:
                self._exchange(client, *self._next())
            except UnavailableError:
                time.sleep(0.5)
            except ReefError as error:
                self.fault = error
                return

    def _exchange(self, client: Client, item: Item, seed: int) -> None:
        messages = [dict(message) for message in item.messages]
        session = uuid.uuid4().hex
        answer = self._ask(client, messages, session, self._style.max_tokens, seed)
        text: str = answer.json["choices"][0]["message"]["content"] or ""
        score = grade_now(item.grader, text).score
        if self._style.says is None:
            body: dict[str, Any] = {"score": score, "references": [answer.headers["x-reef-agent-record-id"]]}
            client.request("POST", "/reef/report", body, headers={"x-reef-scenario": self._scenario})
        else:
            said = {"role": "user", "content": self._style.says.reply(score)}
            # The conversation ends with what is said; nobody reads on.
            self._ask(client, [*messages, {"role": "assistant", "content": text}, said], session, 1, seed)
        with self._lock:
            self.scores.append(score)
            self.asked += 1
            self.waiting += 1

    def _ask(self, client: Client, messages: Sequence[Any], session: str, max_tokens: int, seed: int) -> Answer:
        body = {
            "model": "default",
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": self._style.temperature,
            "seed": seed,
        }
        headers = {"x-reef-scenario": self._scenario, "x-reef-tag-session": session}
        return client.request("POST", "/v1/chat/completions", body, headers=headers)
