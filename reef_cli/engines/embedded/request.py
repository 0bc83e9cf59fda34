"""One request from arrival to finish: tokens, log-probs, weight versions, text and how it ended.

Owned by the engine's torch thread; the event loop only reads the `Progress` values that are handed over. Text is decoded
incrementally: only the tail that can still change is decoded again, a split UTF-8 character is held back, and so is text that
may be the beginning of a stop string.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from reef_cli.engines.embedded.adapters import Adapter
from reef_cli.engines.embedded.sampling import Choice, Params

Finish = dict[str, Any]
"""`{"type": "stop", "matched"}`, `{"type": "length", "length"}` or `{"type": "abort", "message", …}`."""


class Text:
    """Incremental text of a growing list of token ids."""

    def __init__(self, decode: Callable[[list[int], bool], str], skip_special_tokens: bool) -> None:
        self._decode = decode
        self._skip = skip_special_tokens
        self._start = 0
        self._read = 0
        self.text = ""

    def feed(self, ids: Sequence[int], final: bool = False) -> str:
        """All text of `ids` that is certain (everything when `final`)."""
        known = self._decode(list(ids[self._start : self._read]), self._skip)
        full = self._decode(list(ids[self._start :]), self._skip)
        if final:
            self.text += full[len(known) :]
            self._start = self._read = len(ids)
        elif len(full) > len(known) and not full.endswith("�"):
            self.text += full[len(known) :]
            self._start, self._read = self._read, len(ids)
        return self.text


@dataclass(slots=True)
class Wish:
    """What the caller asked for, checked."""

    rid: str
    input_ids: list[int]
    params: Params
    adapter: Adapter | None = None
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    token_ids_logprob: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Progress:
    """What the event loop sees of a request: counts into its append-only lists, its text, and the finish when it ended."""

    tokens: int
    text: str
    finish: Finish | None
    cached_tokens: int
    retractions: int


@dataclass(slots=True, eq=False)
class Request:
    """State of one request. Lists only ever grow; `versions[i]` is the weight version that made `output_ids[i]`."""

    wish: Wish
    text: Text
    notify: Callable[[Progress], None]
    output_ids: list[int] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    input_logprobs: list[tuple[float, int]] = field(default_factory=list)
    slot: int | None = None
    filled: int = 0
    """Tokens of prompt plus output whose keys are in the slot."""
    cached_tokens: int = 0
    retractions: int = 0
    finish: Finish | None = None
    visible: str = ""
    started: float = field(default_factory=monotonic)

    @property
    def tokens(self) -> list[int]:
        return self.wish.input_ids + self.output_ids

    @property
    def length(self) -> int:
        return len(self.wish.input_ids) + len(self.output_ids)

    @property
    def decoding(self) -> bool:
        """Whether only the last token's keys are missing."""
        return bool(self.output_ids) and self.filled == self.length - 1

    def take(self, choice: Choice, version: str, eos: frozenset[int], context_length: int) -> None:
        """Append a token and decide whether the request ends with it."""
        self.output_ids.append(choice.token)
        self.choices.append(choice)
        self.versions.append(version)
        params = self.wish.params
        count = len(self.output_ids)
        ends = (not params.ignore_eos and choice.token in eos) or choice.token in params.stop_token_ids
        if ends and count >= params.min_new_tokens:
            self._stop_at_token(choice.token)
        elif count >= params.max_new_tokens or self.length >= context_length:
            self._finish({"type": "length", "length": count})
        else:
            self._look(self.text.feed(self.output_ids))

    def abort(self, message: str, status: int | None = None) -> None:
        """End with what there is."""
        finish: Finish = {"type": "abort", "message": message}
        if status is not None:
            finish |= {"status_code": status, "err_type": "InternalServerError"}
        self._finish(finish)

    def report(self) -> None:
        self.notify(Progress(len(self.output_ids), self.visible, self.finish, self.cached_tokens, self.retractions))

    def _stop_at_token(self, token: int) -> None:
        ids = self.output_ids if self.wish.params.no_stop_trim else self.output_ids[:-1]
        text = self.text.feed(ids, final=True)
        self.finish = {"type": "stop", "matched": token}
        self._match(text)

    def _finish(self, finish: Finish) -> None:
        self.finish = finish
        self._match(self.text.feed(self.output_ids, final=True))

    def _look(self, text: str) -> None:
        if not self._match(text):
            self.visible = text[: len(text) - _overlap(text, self.wish.params.stop)]

    def _match(self, text: str) -> bool:
        """Cut the text at the earliest stop string; a stop string wins over any other way to end."""
        params = self.wish.params
        found = [(at, stop) for stop in params.stop if (at := text.find(stop)) >= 0]
        if not found or len(self.output_ids) < params.min_new_tokens:
            self.visible = text
            return False
        at, stop = min(found)
        self.finish = {"type": "stop", "matched": stop}
        self.visible = text[: at + len(stop)] if params.no_stop_trim else text[:at]
        return True


def _overlap(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins a stop string."""
    longest = 0
    for stop in stops:
        for size in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:size]):
                longest = size
                break
    return longest
