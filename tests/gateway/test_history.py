"""Conversations that go on with the tokens of their answers, where the text says the same, and only there."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from reef_cli.gateway.backends.history import MOST_ANSWERS, History
from tests.doubles.engine import WordChat
from tests.gateway.inference_kit import PATHS, local, post, stored
from tests.gateway.test_inference_local import ask

ASK = {"role": "user", "content": "hi "}
MORE = {"role": "user", "content": "and more"}
TOOLS = [{"type": "function", "function": {"name": "read"}}]


class Chat(WordChat):
    """With a token that ends an answer, which the template writes, and one that no client sees."""

    def text(self, messages, tools=()) -> str:  # type: ignore[no-untyped-def]
        return super().text(messages, tools).replace("<user>and", "<end><user>and")

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        text = super().decode(ids)
        return text.replace("<end>", "").replace("<unseen>", "") if skip_special_tokens else text

    def ids(self, *words: str) -> list[int]:
        """Tokens of these words, one each, however they would be cut."""
        return [self._id(word) for word in words]


@pytest.fixture
def chat() -> Chat:
    return Chat()


@pytest.fixture
def history(chat: Chat) -> History:
    return History(chat)


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_a_conversation_goes_on_with_what_was_sampled(chat: Chat, history: History) -> None:
    first = history.prompt([ASK], TOOLS)
    assert first.ids == chat.render([ASK], TOOLS)
    output = chat.ids("Hel", "lo", "<unseen>", " the", "re", "<end>")
    history.remember(first, output)
    talk = [ASK, answer("Hello there"), MORE]
    second = history.prompt(talk, TOOLS)
    assert second.ids[: len(first.ids) + len(output)] == [*first.ids, *output]
    assert chat.decode(second.ids).replace("<unseen>", "") == chat.decode(chat.render(talk, TOOLS))
    assert second.ids != chat.render(talk, TOOLS)

    history.remember(second, chat.ids("Bye", "bye"))
    third = history.prompt([*talk, answer("Byebye"), MORE], TOOLS)
    assert third.ids[: len(second.ids) + 2] == [*second.ids, *chat.ids("Bye", "bye")], "and so on"


@pytest.mark.parametrize(
    ("talk", "tools"),
    [
        ([ASK, answer("Jello there"), MORE], TOOLS),
        ([ASK, answer("Hello"), MORE], TOOLS),
        ([MORE, answer("Hello there"), MORE], TOOLS),
        ([ASK, answer("Hello there"), MORE], []),
        ([ASK, MORE, answer("Hello there"), MORE], TOOLS),
        ([ASK], TOOLS),
    ],
    ids=["edited", "cut", "another question", "other tools", "a turn more", "asked again"],
)
def test_what_says_something_else_is_encoded_whole(chat: Chat, history: History, talk: list, tools: list) -> None:
    history.remember(history.prompt([ASK], TOOLS), chat.ids("Hel", "lo", " there"))
    assert history.prompt(talk, tools).ids == chat.render(talk, tools)


def test_answers_to_one_prompt_go_on_apart(chat: Chat, history: History) -> None:
    prompt = history.prompt([ASK], ())
    for number in range(MOST_ANSWERS + 3):
        history.remember(prompt, chat.ids("He", "y", f" {number}"))
    for number in (3, 10, MOST_ANSWERS + 2):
        ids = history.prompt([ASK, answer(f"Hey {number}"), MORE], ()).ids
        assert ids[len(prompt.ids) :][:3] == chat.ids("He", "y", f" {number}")
    talk = [ASK, answer("Hey 0"), MORE]
    assert history.prompt(talk, ()).ids == chat.render(talk, ()), "the oldest went"
    history.remember(prompt, chat.ids("Hey", " 9"))
    assert history.prompt([ASK, answer("Hey 9"), MORE], ()).ids[len(prompt.ids) :][:2] == chat.ids("Hey", " 9")


def test_memory_is_bounded(chat: Chat) -> None:
    history = History(chat, most_tokens=100)
    for number in range(50):
        prompt = history.prompt([{"role": "user", "content": f"q{number} "}], ())
        history.remember(prompt, chat.ids("An", "swer"))
        assert history._tokens == sum(len(turn.ids) for turns in history._turns.values() for turn in turns) <= 100

    def spliced(number: int) -> bool:
        ids = history.prompt([{"role": "user", "content": f"q{number} "}, answer("Answer"), MORE], ()).ids
        return chat.ids("An")[0] in ids

    assert spliced(49) and not spliced(0)


class Letters:
    """An engine's tokenizer that samples letter by letter."""

    def __init__(self, chat: WordChat) -> None:
        self._chat = chat

    def encode(self, text: str) -> list[int]:
        return [self._chat._id(letter) for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return self._chat.decode(ids)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("capture", ["on", "off"])
async def test_the_next_turn_begins_with_the_last_one_if_that_was_kept(tmp_path: Path, capture: str, streams: bool) -> None:
    async with local(tmp_path, "one two") as (made, engine):
        words = engine.chat
        engine.chat = Letters(words)  # type: ignore[assignment]
        messages = [{"role": "user", "content": "count"}]
        await post(made, PATHS["chat"], ask("chat", stream=streams) | {"messages": messages}, **{"x-reef-capture": capture})
        talk = [*messages, answer("one two"), MORE]
        _, headers, _ = await post(made, PATHS["chat"], ask("chat") | {"messages": talk})
        first, second = engine.asked
        output = (engine.chat if capture == "on" else words).encode("one two")
        assert list(second.input_ids)[: len(first.input_ids) + len(output)] == [*first.input_ids, *output]
        assert words.decode(second.input_ids) == words.text(talk), "the same prompt to whoever reads it"
        trace = stored(made, headers["x-reef-agent-record-id"]).tokens
        assert trace is not None and list(trace.prompt_ids) == list(second.input_ids)
