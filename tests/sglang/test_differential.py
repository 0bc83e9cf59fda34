"""The same requests to both engines: tokens, log-probs, finish reasons, cached prefixes, refusals, adapters."""

import math
from pathlib import Path
from typing import Any

import pytest

from reef_cli.core.errors import ContextOverflow, EngineError, InvalidRequest
from reef_cli.core.ports import Sampling
from reef_cli.engines.chat_format import ModelChat
from reef_cli.engines.client import EngineClient
from tests.sglang.adapters import make_adapter
from tests.sglang.running import Running, apart, facts, scores

MEAN, LARGEST = 0.06, 0.4
"""Log-probs of the two engines, both in bfloat16 with other kernels: mean and largest difference in nats."""
TIE = 0.15
"""Two first candidates closer than this in nats: rounding decides, and the answers may go apart from there."""
QUESTIONS = ("What is the capital of France?", "Name three colours.", "Write one line of Python that prints 7.")
Pair = dict[str, Running]


@pytest.fixture(scope="module")
def prompts(language_model: Path) -> list[list[int]]:
    chat = ModelChat(language_model)
    return [chat.render([{"role": "user", "content": question}]) for question in QUESTIONS]


@pytest.fixture(scope="module")
def loaded(pair: Pair, language_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Both engines with the adapter `s@a`."""
    folder = make_adapter(tmp_path_factory.mktemp("adapter") / "a", language_model, seed=1)
    for engine in pair.values():
        reply = engine.post("/load_lora_adapter", {"lora_name": "s@a", "lora_path": str(folder), "pinned": False})
        assert reply.status_code == 200 and reply.json()["success"], reply.text
    return pair


def assert_alike(one: dict[str, Any], two: dict[str, Any]) -> int:
    """Log-probs within the tolerance and equal tokens, up to a first choice that was a tie; how many tokens that is."""
    (ids, logprobs), (others, other_logprobs) = facts(one), facts(two)
    same = next((at for at, (a, b) in enumerate(zip(ids, others, strict=False)) if a != b), min(len(ids), len(others)))
    if same < max(len(ids), len(others)):
        candidates = {entry[1]: entry[0] for entry in one["meta_info"]["output_top_logprobs"][same]}
        margin = candidates[ids[same]] - candidates[others[same]]
        print(f"token {same} of {len(ids)} is a tie: {margin:.4f} nats")
        assert margin < TIE, (same, ids, others)
    gaps = [abs(a - b) for a, b in zip(logprobs[:same], other_logprobs[:same], strict=True)]
    print(f"log-probs of {same} tokens differ by {sum(gaps) / len(gaps):.4f} on average, {max(gaps):.4f} at most")
    assert sum(gaps) / len(gaps) < MEAN and max(gaps) < LARGEST
    return same


@pytest.mark.parametrize("number", range(len(QUESTIONS)))
def test_greedy_tokens_are_equal_and_logprobs_close(pair: Pair, prompts: list[list[int]], number: int) -> None:
    replies = {kind: engine.generate(prompts[number], max_new_tokens=24) for kind, engine in pair.items()}
    one, two = replies["embedded"], replies["sglang"]
    if assert_alike(one, two) == len(one["output_ids"]):
        assert one["text"] == two["text"] and one["meta_info"]["finish_reason"] == two["meta_info"]["finish_reason"]
    for reply in replies.values():
        meta, count = reply["meta_info"], len(reply["output_ids"])
        assert count == meta["completion_tokens"] == len(meta["output_token_logprobs"])
        assert [entry[1] for entry in meta["output_token_logprobs"]] == reply["output_ids"]
        assert all(entry[0] <= 0 and math.isfinite(entry[0]) for entry in meta["output_token_logprobs"])
        assert meta["weight_versions"] == [{"version": "base", "start": 0, "end": count}]
        assert meta["prompt_tokens"] == len(prompts[number])


def test_logprobs_at_a_temperature_are_of_the_tempered_distribution(pair: Pair, prompts: list[list[int]]) -> None:
    """Ten candidates for the first token of the answer; what was sampled does not matter. Half the temperature doubles what the
    two engines differ by."""
    temperature = 0.5

    def candidates(engine: Running, **sampling: float) -> dict[int, float]:
        body = {"input_ids": prompts[1], "return_logprob": True, "top_logprobs_num": 10}
        reply = engine.reply(body | {"sampling_params": {"max_new_tokens": 1, **sampling}})
        return {entry[1]: entry[0] for entry in reply.json()["meta_info"]["output_top_logprobs"][0]}

    found = {kind: candidates(engine, temperature=temperature, top_p=0.9) for kind, engine in pair.items()}
    one, two = found["embedded"], found["sglang"]
    shared = one.keys() & two.keys()
    assert len(shared) >= 8
    gaps = [abs(one[token] - two[token]) for token in shared]
    print(f"log-probs of {len(shared)} candidates differ by {sum(gaps) / len(gaps):.4f} on average, {max(gaps):.4f} at most")
    assert max(gaps) < LARGEST / temperature
    plain = candidates(pair["embedded"], temperature=1.0)
    both = shared & plain.keys()
    tempered, untempered = (sum(abs(side[token] - two[token]) for token in both) for side in (one, plain))
    print(f"untempered they would differ by {untempered / len(both):.4f}")
    assert 2 * tempered < untempered


def test_ends_are_reported_alike(engine: Running, prompts: list[list[int]]) -> None:
    ended = engine.generate(prompts[0], max_new_tokens=5, logit_bias={"2": 100.0})
    assert ended["output_ids"] == [2] and ended["text"] == ""
    assert ended["meta_info"]["finish_reason"] == {"type": "stop", "matched": 2}
    cut = engine.generate(prompts[0], max_new_tokens=3, ignore_eos=True)
    assert cut["meta_info"]["finish_reason"] == {"type": "length", "length": 3}
    stopped = engine.generate(prompts[0], max_new_tokens=24, stop=["Paris"])
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": "Paris"}
    assert "Paris" not in stopped["text"]


def test_a_prefix_is_kept_and_a_flush_forgets_it(engine: Running, prompts: list[list[int]]) -> None:
    ids = prompts[2] * 3
    assert engine.post("/flush_cache?timeout=30").status_code == 200
    first, again = (engine.generate(ids, max_new_tokens=2)["meta_info"]["cached_tokens"] for _ in range(2))
    assert first == 0 and len(ids) - 32 <= again < len(ids)
    assert engine.post("/flush_cache?timeout=30").status_code == 200
    assert engine.generate(ids, max_new_tokens=2)["meta_info"]["cached_tokens"] == 0


async def test_refusals_have_the_same_types(engine: Running) -> None:
    greedy = Sampling(temperature=0.0)
    async with engine.client() as client:
        limit = 8192
        with pytest.raises(ContextOverflow, match="longer than the model's context length"):
            await client.generate([5] * (limit + 1), greedy, max_new_tokens=1)
        with pytest.raises(InvalidRequest, match="top_p"):
            await client.generate([5], Sampling(top_p=2.0), max_new_tokens=1)
        with pytest.raises(InvalidRequest, match="loaded"):
            await client.generate([5], greedy, max_new_tokens=1, adapter="nobody")
        with pytest.raises(InvalidRequest, match="top_p"):
            [delta async for delta in client.stream([5], Sampling(top_p=2.0), max_new_tokens=1)]
        with pytest.raises(EngineError):
            await client.end_update()
        with pytest.raises(EngineError, match="load_lora_adapter"):
            await client.load_lora("x", Path("/nowhere"))
        unknown = engine.reply({"input_ids": [5], "sampling_params": {"temp": 1}})
        assert unknown.status_code == 400 and "unknown field `temp`, expected one of" in unknown.text
        assert (await client.generate([5], greedy, max_new_tokens=1)).output_ids


async def test_a_stream_is_the_whole_answer_in_pieces(engine: Running, prompts: list[list[int]]) -> None:
    greedy = Sampling(temperature=0.0)
    async with engine.client() as client:
        whole = await client.generate(prompts[0], greedy, max_new_tokens=12)
        deltas = [delta async for delta in client.stream(prompts[0], greedy, max_new_tokens=12)]
    assert "".join(delta.text for delta in deltas) == whole.text and len(deltas) > 2
    last = deltas[-1].completion
    assert last is not None and (last.output_ids, last.finish, last.spans) == (whole.output_ids, whole.finish, whole.spans)


def test_an_adapter_says_the_same_in_both(loaded: Pair, prompts: list[list[int]]) -> None:
    ids = prompts[0] + prompts[2]
    base, one, two = scores(loaded["sglang"], ids), *(scores(loaded[kind], ids, "s@a") for kind in ("embedded", "sglang"))
    print(f"the engines are {apart(one, two):.4f} apart, the adapter moves by {apart(base, two):.4f}")
    assert apart(base, two) > 5 * apart(one, two)


async def test_adapters_are_listed_named_once_and_unloaded(loaded: Pair, language_model: Path, tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "b", language_model, seed=2)
    for engine in loaded.values():
        async with engine.client() as client:
            await client.load_lora("s@b", folder)
            assert sorted(await client.adapters()) == ["s@a", "s@b"]
            with pytest.raises(EngineError):
                await client.load_lora("s@b", folder)
            await client.unload_lora("s@b")
            assert await client.adapters() == ["s@a"]
            with pytest.raises(EngineError):
                await client.unload_lora("s@b")


async def test_an_adapter_too_large_is_refused_and_the_engine_lives(loaded: Pair, language_model: Path, tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "c", language_model, seed=3, rank=17)
    for engine in loaded.values():
        async with engine.client() as client:
            with pytest.raises(EngineError):
                await client.load_lora("s@c", folder)
            assert (await client.generate([5], Sampling(temperature=0.0), max_new_tokens=1)).output_ids


async def test_an_adapter_that_travels_says_what_the_one_that_is_read_says(
    loaded: Pair, prompts: list[list[int]], language_model: Path, tmp_path: Path
) -> None:
    folder = make_adapter(tmp_path / "a", language_model, seed=1)
    for engine in loaded.values():
        keys = (engine.launch.api_key, engine.launch.admin_key)
        async with EngineClient(engine.url, *keys, sends_adapters=True) as client:
            await client.load_lora("s@sent", folder)
        for prompt in prompts:
            read, sent, base = (engine.generate(prompt, path=name, max_new_tokens=16) for name in ("s@a", "s@sent", None))
            assert facts(sent)[0] == facts(read)[0] != facts(base)[0]
            assert apart(facts(sent)[1], facts(read)[1]) < MEAN
        async with engine.client() as client:
            assert sorted(await client.adapters()) == ["s@a", "s@sent"]
            with pytest.raises(EngineError):
                await client.load_lora("s@sent", folder)
            await client.unload_lora("s@sent")
            assert await client.adapters() == ["s@a"]
