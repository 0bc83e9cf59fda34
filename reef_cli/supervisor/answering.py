"""Answers for evaluations and judges: the model's template around the engine, outside the record."""

from collections.abc import Mapping, Sequence
from typing import Any

from reef_cli.core.ports import Answer, ChatTemplate, GenerateRequest, Generation, Sampling
from reef_cli.core.types import Release


class ModelAnswering:
    """Implements the port `Answering` over a local engine."""

    def __init__(self, generation: Generation, chat: ChatTemplate) -> None:
        self._generation = generation
        self._chat = chat

    async def answer(self, messages: Sequence[Mapping[str, Any]], sampling: Sampling, release: Release | None) -> Answer:
        request = GenerateRequest(input_ids=self._chat.render(messages), sampling=sampling, release=release)
        completion = await self._generation.generate(request)
        return Answer(completion.text, len(completion.output_ids), completion.finish, completion)
