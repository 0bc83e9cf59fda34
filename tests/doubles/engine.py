"""A local engine and a chat template without a model: words for tokens, answers under the tests' control.

`ScriptedServing` implements the port `Serving`; it answers `text`, cut into the tokens of `WordChat`. `WordChat` implements
`ChatTemplate` with one token per run of letters, blanks or other characters, and reads `<think>` and `<tool_call>` tags.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from reef_cli.core.errors import UnsupportedField
from reef_cli.core.ports import Completion, Delta, GenerateRequest, ParsedMessage
from reef_cli.core.types import Release, TokenSpan

_TOKEN = re.compile(r"[A-Za-z]+|\s+|.", re.DOTALL)
_THINK = re.compile(r"<think>(.*?)</think>", re.DOTALL)
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


class WordChat:
    """Tokenizer and template of a model that does not exist."""

    def __init__(self, context_length: int = 1_000_000, opens_thinking: bool = False) -> None:
        self.context_length = context_length
        self.tail = "<assistant><think>" if opens_thinking else "<assistant>"
        self._ids: dict[str, int] = {}
        self._words: list[str] = []

    def encode(self, text: str) -> list[int]:
        return [self._id(word) for word in _TOKEN.findall(text)]

    def _id(self, word: str) -> int:
        if word not in self._ids:
            self._ids[word] = len(self._words)
            self._words.append(word)
        return self._ids[word]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(self._words[token] for token in ids)

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        return self.encode(self.text(messages, tools))

    def text(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        lines = [f"<{message['role']}>{_text(message['content'])}{_calls(message)}" for message in messages]
        return "".join((json.dumps(list(tools)), *lines, self.tail))

    def marked_by_special(self, tools: bool) -> bool:
        return False

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedMessage:
        reasoning = "".join(_THINK.findall(text)).strip() or None
        text = _THINK.sub("", text)
        calls = []
        if tools:
            for index, call in enumerate(_CALL.findall(text)):
                value = json.loads(call)
                function = {"name": value["name"], "arguments": json.dumps(value["arguments"])}
                calls.append({"id": f"call_{index}", "type": "function", "function": function})
            text = _CALL.sub("", text)
        return ParsedMessage(text.strip() or (None if calls else ""), tuple(calls), reasoning)


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part["type"] != "text":
            raise UnsupportedField(f"Content of type `{part['type']}` cannot be served.", param=part["type"])
    return "".join(part["text"] for part in content)


def _calls(message: Mapping[str, Any]) -> str:
    return json.dumps(message["tool_calls"]) if message.get("tool_calls") else ""


class ScriptedServing:
    """Answers `text`. `error` is raised instead, before the first token or after `error_after` of them; `gap` is the seconds
    between tokens; `aborted` lists requests that were closed early; `asked` every request."""

    def __init__(self, chat: WordChat, text: str = "Hello from the engine.") -> None:
        self.chat = chat
        self.text = text
        self.texts: Sequence[str] = ()
        self.error: Exception | None = None
        self.error_after = 0
        self.gap = 0.0
        self.delay = 0.0
        self.finish: Any = None
        self.asked: list[GenerateRequest] = []
        self.aborted: list[str | None] = []

    async def generate(self, request: GenerateRequest) -> Completion:
        async with aclosing(self.stream(request)) as deltas:
            async for delta in deltas:
                if delta.completion is not None:
                    return delta.completion
        raise AssertionError("a stream ends with its completion")

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        self.asked.append(request)
        number = int((request.rid or "-0").rpartition("-")[2])
        ids = self.chat.encode(self.texts[number] if self.texts else self.text)
        limit = request.sampling.max_new_tokens
        finish = self.finish or ("length" if limit is not None and len(ids) > limit else "stop")
        ids = ids[:limit]
        done = False
        try:
            await asyncio.sleep(self.delay)
            logprobs = self._logprobs(len(ids))
            for at, token in enumerate(ids):
                if self.error is not None and at >= self.error_after:
                    raise self.error
                yield Delta(self.chat.decode([token]), tokens=((token, logprobs[at]),))
                await asyncio.sleep(self.gap)
            done = True
            yield Delta("", self._completion(request, tuple(ids), finish))
        finally:
            if not done:
                self.aborted.append(request.rid)

    def _completion(self, request: GenerateRequest, ids: tuple[int, ...], finish: Any) -> Completion:
        version = self.version_of(request.release) if request.release else "base"
        spans = (TokenSpan(version, 0, len(ids)),) if ids else ()
        logprobs = self._logprobs(len(ids))
        return Completion(self.chat.decode(ids), ids, logprobs, finish, spans, len(request.input_ids), cached_tokens=2)

    @staticmethod
    def _logprobs(count: int) -> tuple[float, ...]:
        return tuple(-0.25 * (1 + at % 3) for at in range(count))

    async def load(self, release: Release, directory: Path | None) -> None: ...

    async def unload(self, release: Release) -> None: ...

    def version_of(self, release: Release) -> str:
        return "base" if release.kind == "base" else f"{release.scenario}@{release.release_id}"

    def servable(self, release: Release) -> bool:
        return True

    async def info(self) -> Mapping[str, Any]:
        return {}
