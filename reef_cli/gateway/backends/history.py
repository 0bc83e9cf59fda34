"""Conversations continued with the very tokens they were made of.

A client sends the transcript back as text. Encoded anew, an answer may come out as other tokens than the model sampled, so that
the turns of one episode would be no sequence the policy ever saw, and the engine would find nothing of them in its cache. The
tokens of recent answers are kept here: a prompt that goes on from one, letter for letter, begins with its tokens, and only what
follows is encoded. Where the template writes the past differently (leaves out reasoning, say) the prompt is encoded whole.

Lives in memory: after a restart a conversation that goes on is encoded anew once.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from reef_cli.core.ports import ChatTemplate

MOST_TOKENS = 1 << 22
"""16 MB: the newest turns of forty agents with a hundred thousand tokens each."""

MOST_ANSWERS = 64
"""Answers kept of one prompt: a group of rollouts shares it."""

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered prompt: its text, its tokens, and the key of what it says."""

    text: str
    ids: Sequence[int]
    key: bytes


@dataclass(frozen=True, slots=True)
class _Turn:
    """A prompt with its answer: how long its text is, the text's digest, and the tokens of both."""

    length: int
    digest: bytes
    ids: "array[int]"


class History:
    """The answers of one model; the oldest go first."""

    def __init__(self, chat: ChatTemplate, most_tokens: int = MOST_TOKENS) -> None:
        self._chat = chat
        self._most = most_tokens
        self._turns: OrderedDict[bytes, list[_Turn]] = OrderedDict()
        self._tokens = 0

    def prompt(self, messages: Messages, tools: Messages) -> Prompt:
        """The prompt of these messages. Raises what the template raises."""
        text = self._chat.text(messages, tools)
        turn = self._continued(messages, tools, text)
        ids = self._chat.encode(text) if turn is None else [*turn.ids, *self._chat.encode(text[turn.length :])]
        return Prompt(text, ids, _key(messages, tools))

    def remember(self, prompt: Prompt, output_ids: Sequence[int]) -> None:
        """Keep an answer's tokens."""
        text = prompt.text + self._said(output_ids)
        turn = _Turn(len(text), _digest(text), array("I", [*prompt.ids, *output_ids]))
        turns = self._turns.setdefault(prompt.key, [])
        self._turns.move_to_end(prompt.key)
        same = [at for at, one in enumerate(turns) if one.digest == turn.digest]
        for at in same or ([0] if len(turns) == MOST_ANSWERS else []):
            self._tokens -= len(turns.pop(at).ids)
        turns.append(turn)
        self._tokens += len(turn.ids)
        while self._tokens > self._most:
            _, gone = self._turns.popitem(last=False)
            self._tokens -= sum(len(one.ids) for one in gone)

    def _said(self, output_ids: Sequence[int]) -> str:
        """An answer's text as it comes back: without the special tokens inside, which no client sees, with those that end it,
        which the template writes."""
        end = len(output_ids)
        while end and not self._chat.decode(output_ids[end - 1 : end]):
            end -= 1
        ending = self._chat.decode(output_ids[end:], skip_special_tokens=False)
        return self._chat.decode(output_ids[:end]) + ending

    def _continued(self, messages: Messages, tools: Messages, text: str) -> _Turn | None:
        """The remembered turn this prompt goes on from: same messages up to the last answer, same text up to its end."""
        last = next((at for at in range(len(messages) - 1, 0, -1) if messages[at].get("role") == "assistant"), None)
        if last is None or not self._turns:
            return None
        turns = self._turns.get(_key(messages[:last], tools), ())
        return next((turn for turn in reversed(turns) if _digest(text[: turn.length]) == turn.digest), None)


def _key(messages: Messages, tools: Messages) -> bytes:
    said = orjson.dumps([list(messages), list(tools)], default=str, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
    return hashlib.blake2b(said, digest_size=16).digest()


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
