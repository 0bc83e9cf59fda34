"""Answers for evaluations and judges, outside the record: from a local engine, or from an upstream provider."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from reef_cli.config.schema import EvaluationSettings
from reef_cli.core.errors import ConfigError, EngineUnavailable, UnsupportedField, UpstreamError
from reef_cli.core.ports import Answer, Answering, ChatTemplate, GenerateRequest, Generation, Sampling
from reef_cli.core.types import Release
from reef_cli.evaluation.asking import Bench
from reef_cli.evaluation.budget import Price

if TYPE_CHECKING:
    import aiohttp

# Asked again after a pause; any other refusal is final.
_TRANSIENT = (429, 502, 503, 504)


class ModelAnswering:
    """Implements the port `Answering` over a local engine."""

    def __init__(self, generation: Generation, chat: ChatTemplate) -> None:
        self._generation = generation
        self._chat = chat

    async def answer(self, messages: Sequence[Mapping[str, Any]], sampling: Sampling, release: Release | None) -> Answer:
        request = GenerateRequest(input_ids=self._chat.render(messages), sampling=sampling, release=release)
        completion = await self._generation.generate(request)
        return Answer(completion.text, len(completion.output_ids), completion.finish, completion, completion.prompt_tokens)


def bench_of(settings: EvaluationSettings, own: Answering, session: "Callable[[], aiohttp.ClientSession]") -> Bench:
    """The judge and the prices of an evaluation; without `judge_url` the deployment's own base model judges."""
    judge, price = own, Price(settings.price_prompt, settings.price_output)
    judge_price = Price(settings.judge_price_prompt, settings.judge_price_output)
    if settings.judge_url is not None:
        judge = UpstreamAnswering(settings.judge_url, settings.judge_model or "judge", settings.judge_api_key, session)
    return Bench(judge, judge_price if settings.judge_url is not None else price, price)


class UpstreamAnswering:
    """Implements the port `Answering` over a provider that speaks chat completions."""

    def __init__(self, url: str, model: str | None, key: str | None, session: "Callable[[], aiohttp.ClientSession]") -> None:
        self._url = f"{url.rstrip('/')}/chat/completions"
        self._model = model
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._session = session

    async def answer(self, messages: Sequence[Mapping[str, Any]], sampling: Sampling, release: Release | None) -> Answer:  # noqa: ARG002 - an upstream has one model
        if self._model is None:
            raise ConfigError(
                "no model is named",
                why="Reef asks the provider for one here, not a client",
                hint="set engine.model in serve.yaml",
            )
        body: dict[str, Any] = {"model": self._model, "messages": list(messages), "temperature": sampling.temperature}
        if sampling.max_new_tokens is not None:
            body["max_tokens"] = sampling.max_new_tokens
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        if sampling.logit_bias:
            raise UnsupportedField("logit_bias has no meaning for an upstream evaluation.")
        import aiohttp  # most deployments never ask: a sixth of the time of a start

        try:
            async with self._session().post(
                self._url, json=body, headers={**self._headers, "Accept-Encoding": "identity"}
            ) as response:
                text = await response.text()
                if response.status in _TRANSIENT:
                    raise EngineUnavailable(f"The provider is overloaded ({response.status}).", why=text[:200])
                if response.status >= 400:
                    raise UpstreamError(f"The provider answered {response.status}.", why=text[:200])
                return _answer(await response.json(content_type=None))
        except (aiohttp.ClientError, TimeoutError) as error:
            raise UpstreamError("The connection to the provider failed.", why=str(error)) from error


def _answer(body: Any) -> Answer:
    try:
        choice = body["choices"][0]
        text = choice["message"].get("content") or ""
        usage = body.get("usage") or {}
        tokens, prompt, cost = (usage.get(name) for name in ("completion_tokens", "prompt_tokens", "cost"))
        finish = str(choice.get("finish_reason") or "stop")
        return Answer(text, int(tokens or 0), finish, None, int(prompt or 0), None if cost is None else float(cost))
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise UpstreamError("The provider's answer has no choices.", hint="Is engine.api right for this provider?") from error
