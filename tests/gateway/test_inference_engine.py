"""The whole road to a real engine process: a tiny random model behind the real client, template and admission gate."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import orjson
import pytest

from reef_cli.config.schema import ReefSettings
from reef_cli.engines.chat_format import ModelChat
from reef_cli.engines.client import EngineClient
from reef_cli.engines.serving import LocalServing
from reef_cli.gateway.backends.local import LocalBackend
from reef_cli.gateway.deps import GatewayOptions
from tests.engines.live import Live, make_model
from tests.gateway.fakes import House, house
from tests.gateway.inference_kit import PATHS, H, ask, only, payloads, post, stored
from tests.gateway.test_inference_local import gathered, shown


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Live]]:
    model = make_model(tmp_path_factory.mktemp("model"))
    running = Live(model, tmp_path_factory.mktemp("engine") / "log").wait()
    yield model, running
    running.stop()


@pytest.fixture
async def served(engine: tuple[Path, Live], tmp_path: Path) -> AsyncIterator[House]:
    model, running = engine
    async with EngineClient(running.url) as client:
        chat = ModelChat(model)
        backend = LocalBackend(LocalServing(client, model_dir=model), chat, model="tiny")
        async with house(tmp_path, ReefSettings(), GatewayOptions(), backend=backend, chat=chat) as made:
            yield made


LIMIT = {"chat": "max_completion_tokens", "messages": "max_tokens", "responses": "max_output_tokens"}


@pytest.mark.parametrize("dialect", list(PATHS))
async def test_greedy_answers_are_alike_whole_and_streamed(served: House, dialect: str) -> None:
    body = {**ask(dialect, "the quick brown fox", temperature=0), LIMIT[dialect]: 24}
    status, headers, raw = await post(served, PATHS[dialect], body)
    assert status == 200, raw
    first = stored(served, headers["x-reef-agent-record-id"])
    status, headers, stream = await post(served, PATHS[dialect], {**body, "stream": True})
    assert status == 200 and gathered(dialect, payloads(stream)) == shown(dialect, orjson.loads(raw))
    second = stored(served, headers["x-reef-agent-record-id"])
    assert first.tokens is not None and second.tokens is not None
    assert first.tokens.output_ids == second.tokens.output_ids and first.tokens.fault() is None is second.tokens.fault()
    assert headers["x-reef-weight-version"] == "base" == second.weight_version


async def test_sampled_answers_hold_the_policys_own_logprobs(served: House) -> None:
    _, headers, raw = await post(served, PATHS["chat"], ask("chat", "seven wizards", max_tokens=16, logprobs=True, seed=4))
    record = stored(served, headers["x-reef-agent-record-id"])
    assert record.tokens is not None and "trainable" not in record.usage
    content = orjson.loads(raw)["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == list(record.tokens.logprobs)
    assert record.usage["completion_tokens"] == len(record.tokens.output_ids) <= 16


async def test_an_overflow_is_found_before_the_engine(served: House) -> None:
    status, _, raw = await post(served, PATHS["chat"], ask("chat", "word " * 2000))
    assert status == 400 and "maximum context length is 512 tokens" in orjson.loads(raw)["error"]["message"]


async def test_a_client_that_leaves_frees_the_engine(served: House, engine: tuple[Path, Live]) -> None:
    body = ask("chat", "box", stream=True, ignore_eos=True)
    async with served.client.post(PATHS["chat"], json=body, headers=H) as answer:
        await answer.content.readany()
        answer.close()
    async with EngineClient(engine[1].url) as client:
        for _ in range(100):
            states = (await client.server_info()).get("internal_states") or [{}]
            if not states[0].get("running") and served.records():
                break
            await asyncio.sleep(0.05)
        assert not states[0].get("running")
    record = only(served)
    assert not record.complete and record.error == "client_disconnected"
