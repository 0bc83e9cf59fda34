"""The client against a real engine, and its bodies against the contract's own field names."""

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reef_cli.core.errors import ContextOverflow, EngineError, EngineUnavailable, InvalidRequest
from reef_cli.core.ports import Sampling
from reef_cli.core.types import TokenSpan, TokenTrace
from reef_cli.engines.client import EngineClient
from reef_cli.engines.embedded.sampling import parse
from reef_cli.engines.generation import Gathered, completion, request_body
from tests.engines.live import Live, free_port, ids_of

GREEDY = Sampling(temperature=0.0, ignore_eos=True)


@pytest.fixture
async def client(live: Live):
    async with EngineClient(live.url) as made:
        yield made


async def test_a_completion_is_a_sound_trace(client: EngineClient) -> None:
    done = await client.generate(ids_of(20), GREEDY, max_new_tokens=10)
    assert done.spans == (TokenSpan("base", 0, 10),) and done.finish == "length" and done.prompt_tokens == 20
    trace = TokenTrace(tuple(ids_of(20)), done.output_ids, done.logprobs, (1,) * 10, done.spans)
    assert trace.fault() is None


async def test_a_stream_gives_the_same_completion_in_pieces(client: EngineClient) -> None:
    whole = await client.generate(ids_of(20), GREEDY, max_new_tokens=12)
    deltas = [delta async for delta in client.stream(ids_of(20), GREEDY, max_new_tokens=12)]
    assert "".join(delta.text for delta in deltas) == whole.text
    assert [delta.completion for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    last = deltas[-1].completion
    assert [pair for delta in deltas for pair in delta.tokens] == list(zip(whole.output_ids, whole.logprobs, strict=True))
    assert last is not None and (last.output_ids, last.logprobs, last.spans) == (whole.output_ids, whole.logprobs, whole.spans)


async def test_leaving_early_aborts_in_the_engine(client: EngineClient) -> None:
    async def running() -> int:
        return (await client.server_info())["internal_states"][0]["running"]

    stream = client.stream(ids_of(20), GREEDY, max_new_tokens=450)
    await anext(stream)
    await stream.aclose()
    task = asyncio.ensure_future(client.generate(ids_of(20), GREEDY, max_new_tokens=450))
    while not await running():
        await asyncio.sleep(0.005)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    steps = (await client.server_info())["internal_states"][0]["steps"]
    while await running():
        await asyncio.sleep(0.005)
    assert (await client.server_info())["internal_states"][0]["steps"] - steps < 300


async def test_refusals_are_typed(client: EngineClient, tmp_path: Path) -> None:
    with pytest.raises(ContextOverflow, match="longer than the model's context length"):
        await client.generate(ids_of(600), GREEDY, max_new_tokens=1)
    with pytest.raises(InvalidRequest, match="top_p"):
        await client.generate([5], Sampling(top_p=2.0), max_new_tokens=1)
    with pytest.raises(InvalidRequest, match="not loaded"):
        await client.generate([5], GREEDY, max_new_tokens=1, adapter="nobody")
    with pytest.raises(InvalidRequest):
        [delta async for delta in client.stream([5], Sampling(top_p=2.0), max_new_tokens=1)]
    with pytest.raises(EngineError, match="load_lora_adapter") as caught:
        await client.load_lora("x", tmp_path)
    assert "adapter_config.json" in caught.value.why
    with pytest.raises(EngineError):
        await client.end_update()


async def test_a_missing_engine_is_unavailable() -> None:
    async with EngineClient(f"http://127.0.0.1:{free_port()}") as client:
        with pytest.raises(EngineUnavailable, match="temporarily unavailable"):
            await client.model_info()
        with pytest.raises(EngineUnavailable):
            [delta async for delta in client.stream([5], GREEDY, max_new_tokens=1)]


async def test_control_calls(client: EngineClient, lora: Path) -> None:
    before = await client.checksum()
    await client.load_lora("c@1", lora)
    assert await client.adapters() == ["c@1"]
    adapted = await client.generate(ids_of(20), GREEDY, max_new_tokens=10, adapter="c@1")
    assert adapted.output_ids != (await client.generate(ids_of(20), GREEDY, max_new_tokens=10)).output_ids
    await client.unload_lora("c@1")
    assert await client.adapters() == [] and await client.checksum() == before
    await client.pause("retract")
    await client.begin_update()
    await client.end_update()
    await client.flush(5)
    await client.set_version("base")
    await client.resume()
    assert (await client.model_info())["weight_version"] == "base"


async def test_flushing_under_load_is_an_engine_error(client: EngineClient) -> None:
    stream = client.stream(ids_of(20), GREEDY, max_new_tokens=450)
    await anext(stream)
    with pytest.raises(EngineError, match="did not flush"):
        await client.flush(0)
    await stream.aclose()
    await client.flush(20)


def test_every_sampling_field_is_one_the_wire_knows() -> None:
    full = Sampling(stop=("a",), stop_token_ids=(1,), seed=5, logit_bias={3: 1.0}, top_k=4, min_new_tokens=2)
    body = request_body([1, 2], full, 9, "s@a", "rid", stream=True)
    params = parse(body["sampling_params"], 100)
    assert (params.max_new_tokens, params.stop, params.sampling_seed, params.top_k) == (9, ("a",), 5, 4)
    assert params.logit_bias == ((3, 1.0),) and body["return_logprob"] and body["lora_path"] == "s@a" and body["stream"]


def _chunk(ids: list[int], total: int, text: str, finish: dict | None, logprobs: list[int] | None = None) -> dict:
    meta = {"completion_tokens": total, "finish_reason": finish, "prompt_tokens": 1, "weight_version": "w"}
    meta["output_token_logprobs"] = [[-1.0, token, None] for token in (ids if logprobs is None else logprobs)]
    return {"output_ids": ids, "text": text, "meta_info": meta}


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.data())
def test_cumulative_and_incremental_chunks_gather_alike(ids: list[int], data: st.DataObject) -> None:
    cuts = sorted({*data.draw(st.lists(st.integers(1, len(ids)), max_size=4)), len(ids)})
    word = lambda part: "".join(str(each) for each in part)  # noqa: E731
    gathered = [Gathered(), Gathered()]
    texts = ["", ""]
    start = 0
    for end in cuts:
        finish = {"type": "stop", "matched": 2} if end == len(ids) else None
        texts[0] += gathered[0].add(_chunk(ids[:end], end, word(ids[:end]), finish))
        texts[1] += gathered[1].add(_chunk(ids[start:end], end, word(ids[start:end]), finish))
        start = end
    done = [each.completion() for each in gathered]
    assert done[0] == done[1] and done[0].output_ids == tuple(ids) and done[0].matched == 2
    assert [text + each.unsent() for text, each in zip(texts, gathered, strict=True)] == [word(ids)] * 2


def test_contradictions_are_errors() -> None:
    stop = {"type": "stop"}
    for chunk in (_chunk([1, 2], 3, "", stop), _chunk([1, 2], 2, "", stop, [1]), _chunk([1, 2], 2, "", stop, [1, 3])):
        gathered = Gathered()
        gathered.add(chunk)
        with pytest.raises(EngineError):
            gathered.completion()
    broken = Gathered()
    broken.add(_chunk([], 0, "", {"type": "abort", "message": "boom", "status_code": 500}))
    with pytest.raises(EngineError, match="broke off"):
        broken.completion()


def test_log_probs_that_are_no_numbers_are_the_engines_error() -> None:
    meta = {"completion_tokens": 1, "prompt_tokens": 1, "finish_reason": {"type": "stop"}, "weight_version": "base"}
    reply = {"output_ids": [7], "text": "a", "meta_info": {**meta, "output_token_logprobs": [[None, 7, None]]}}
    with pytest.raises(EngineError, match="no numbers"):
        completion(reply)
