"""The HTTP contract of `/generate`, chat and information routes, against a real process."""

import json
import math
from itertools import pairwise
from pathlib import Path

import httpx
import pytest
import torch

from tests.engines.live import Live, ids_of


def test_a_generation_carries_ids_logprobs_versions_and_finish(live: Live) -> None:
    reply = live.generate(ids_of(20), max_new_tokens=12, ignore_eos=True)
    meta = reply["meta_info"]
    assert len(reply["output_ids"]) == meta["completion_tokens"] == len(meta["output_token_logprobs"]) == 12
    assert [entry[1] for entry in meta["output_token_logprobs"]] == reply["output_ids"]
    assert all(entry[0] <= 0 and math.isfinite(entry[0]) for entry in meta["output_token_logprobs"])
    assert meta["weight_versions"] == [{"version": "base", "start": 0, "end": 12}]
    assert meta["finish_reason"] == {"type": "length", "length": 12} and meta["prompt_tokens"] == 20


def test_logprobs_equal_a_plain_transformers_forward(live: Live, tiny) -> None:
    from transformers import AutoModelForCausalLM

    ids = ids_of(60, 1)
    body = {
        "input_ids": ids,
        "sampling_params": {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 3,
        "token_ids_logprob": [7, 9],
    }
    reply = live.post("/generate", body).json()
    meta = reply["meta_info"]
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    whole = ids + reply["output_ids"]
    with torch.no_grad():
        logprobs = model(torch.tensor([whole])).logits[0].log_softmax(-1)
    for position, (value, token, _) in enumerate(meta["output_token_logprobs"], start=len(ids) - 1):
        assert value == pytest.approx(float(logprobs[position, token]), abs=0.15)
    assert meta["input_token_logprobs"][0] == [None, ids[0], None] and len(meta["input_token_logprobs"]) == 60
    for position, (value, token, _) in enumerate(meta["input_token_logprobs"][1:]):
        assert token == ids[position + 1] and value == pytest.approx(float(logprobs[position, token]), abs=0.15)
    assert all(len(top) == 3 and top[0][0] >= top[1][0] for top in meta["output_top_logprobs"])
    assert [entry[1] for entry in meta["output_token_ids_logprobs"][0]] == [7, 9]


def test_logprobs_at_a_temperature_are_of_the_tempered_distribution(live: Live, tiny) -> None:
    from transformers import AutoModelForCausalLM

    ids = ids_of(30, 2)
    reply = live.generate(ids, temperature=0.5, max_new_tokens=1, top_k=5, top_p=0.9, sampling_seed=4)
    (value, token, _) = reply["meta_info"]["output_token_logprobs"][0]
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)(torch.tensor([ids])).logits[0, -1]
    assert value == pytest.approx(float((logits / 0.5).log_softmax(-1)[token]), abs=0.2)


def test_an_end_token_stays_in_the_ids_with_its_logprob_and_leaves_the_text(live: Live) -> None:
    reply = live.generate(ids_of(10), max_new_tokens=5, logit_bias={"2": 100})
    assert reply["output_ids"] == [2] and reply["text"] == ""
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": 2}
    kept = live.generate(ids_of(10), max_new_tokens=3, logit_bias={"2": 100}, ignore_eos=True)
    assert kept["output_ids"] == [2, 2, 2]


def test_min_new_tokens_holds_back_the_end(live: Live) -> None:
    reply = live.generate(ids_of(10), max_new_tokens=6, min_new_tokens=3, logit_bias={"2": 100})
    assert len(reply["output_ids"]) == 4 and reply["output_ids"][-1] == 2 and 2 not in reply["output_ids"][:3]


def test_stop_tokens_and_stop_strings(live: Live) -> None:
    plain = live.generate(ids_of(10, 3), max_new_tokens=12, ignore_eos=True)
    stop_id = plain["output_ids"][4]
    cut = plain["output_ids"].index(stop_id)
    by_id = live.generate(ids_of(10, 3), max_new_tokens=12, ignore_eos=True, stop_token_ids=[stop_id])
    assert by_id["output_ids"] == plain["output_ids"][: cut + 1]
    assert by_id["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop_id}
    word = "ab"
    bias = {str(token): 100 for token in live.post("/v1/tokenize", {"prompt": "a"}).json()["tokens"]}
    alternating = live.generate(ids_of(10, 3), max_new_tokens=9, stop=[word], logit_bias=bias)
    assert alternating["text"] == "a" * 9
    stopped = live.generate(ids_of(10, 3), max_new_tokens=9, stop=["aaa"], logit_bias=bias)
    assert stopped["text"] == "" and len(stopped["output_ids"]) == 3
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": "aaa"}
    untrimmed = live.generate(ids_of(10, 3), max_new_tokens=9, stop=["aaa"], logit_bias=bias, no_stop_trim=True)
    assert untrimmed["text"] == "aaa"


def test_a_seed_fixes_the_answer_and_another_changes_it(live: Live) -> None:
    first = live.generate(ids_of(10), temperature=1.0, max_new_tokens=20, sampling_seed=1, ignore_eos=True)
    again = live.generate(ids_of(10), temperature=1.0, max_new_tokens=20, sampling_seed=1, ignore_eos=True)
    other = live.generate(ids_of(10), temperature=1.0, max_new_tokens=20, sampling_seed=2, ignore_eos=True)
    assert first["output_ids"] == again["output_ids"] != other["output_ids"]


def test_penalties_and_top_k_do_what_they_say(live: Live) -> None:
    ids = ids_of(10, 5)
    forced = live.generate(ids, max_new_tokens=4, logit_bias={"50": 30, "51": 29}, ignore_eos=True)
    assert forced["output_ids"] == [50] * 4
    spread = live.generate(ids, max_new_tokens=4, logit_bias={"50": 30, "51": 29}, presence_penalty=2.0, ignore_eos=True)
    assert spread["output_ids"][0] == 50 and 51 in spread["output_ids"]
    greedy = live.generate(ids, max_new_tokens=8, ignore_eos=True)
    narrow = live.generate(ids, temperature=1.0, top_k=1, max_new_tokens=8, ignore_eos=True)
    tiny_p = live.generate(ids, temperature=1.0, top_p=1e-6, max_new_tokens=8, ignore_eos=True)
    high_min = live.generate(ids, temperature=1.0, min_p=1.0, max_new_tokens=8, ignore_eos=True)
    assert greedy["output_ids"] == narrow["output_ids"] == tiny_p["output_ids"] == high_min["output_ids"]


def _stream(live: Live, body: dict) -> list[dict]:
    with httpx.stream("POST", live.url + "/generate", json=body | {"stream": True}, timeout=30) as reply:
        lines = [line for line in reply.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def test_stream_chunks_are_cumulative_by_default(live: Live) -> None:
    body = {"input_ids": ids_of(10), "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}}
    chunks = _stream(live, body | {"return_logprob": True})
    whole = live.generate(ids_of(10), max_new_tokens=8, ignore_eos=True)
    assert chunks[-1]["output_ids"] == whole["output_ids"] and chunks[-1]["text"] == whole["text"]
    for before, after in pairwise(chunks):
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert after["text"].startswith(before["text"]) and before["meta_info"]["finish_reason"] is None
    assert len(chunks[-1]["meta_info"]["output_token_logprobs"]) == 8


def test_stream_chunks_are_incremental_on_demand(tiny, tmp_path) -> None:
    engine = Live(tiny, tmp_path / "log", "--incremental-streaming-output").wait()
    try:
        body = {"input_ids": ids_of(10), "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}}
        chunks = _stream(engine, body | {"return_logprob": True})
        whole = engine.generate(ids_of(10), max_new_tokens=8, ignore_eos=True)
        assert [token for chunk in chunks for token in chunk["output_ids"]] == whole["output_ids"]
        assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
        assert sum(len(chunk["meta_info"]["output_token_logprobs"]) for chunk in chunks) == 8
        assert chunks[-1]["meta_info"]["completion_tokens"] == 8
    finally:
        engine.stop()


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"input_ids": [5], "sampling_params": {"temp": 1}}, "unknown field `temp`, expected one of"),
        ({"input_ids": [5] * 600}, "The input (600 tokens) is longer than the model's context length (512 tokens)."),
        ({"input_ids": [5] * 500, "sampling_params": {"max_new_tokens": 100}}, "maximum context length of 512"),
        ({"input_ids": []}, "non-empty list"),
        ({"input_ids": [999]}, "must lie in"),
        ({"input_ids": ["a"]}, "list of integers"),
        ({"input_ids": [True]}, "list of integers"),
        ({}, "Either text or input_ids"),
        ({"input_ids": [5], "sampling_params": {"temperature": -1}}, "temperature"),
        ({"input_ids": [5], "sampling_params": {"temperature": "hot"}}, "malformed"),
        ({"input_ids": [5], "sampling_params": {"top_p": 0}}, "top_p"),
        ({"input_ids": [5], "sampling_params": {"n": 2}}, "n must be 1"),
        ({"input_ids": [5], "sampling_params": {"regex": "a+"}}, "not supported"),
        ({"input_ids": [5], "lora_path": "nobody"}, "not loaded"),
    ],
)
def test_bad_requests_get_400_with_the_reason(live: Live, body: dict, text: str) -> None:
    reply = live.post("/generate", body)
    assert reply.status_code == 400 and text in reply.text


def test_an_unknown_top_level_field_is_ignored_and_garbage_is_not(live: Live) -> None:
    assert (
        live.post("/generate", {"input_ids": [5], "whatever": 1, "sampling_params": {"max_new_tokens": 1}}).status_code == 200
    )
    assert httpx.post(live.url + "/generate", content=b"{nope").status_code == 400
    assert httpx.post(live.url + "/generate", content=b"[1]").status_code == 400


def test_text_prompts_batches_and_tokenizing(live: Live) -> None:
    ids = live.post("/v1/tokenize", {"prompt": "the quick brown fox"}).json()["tokens"]
    assert live.post("/v1/detokenize", {"tokens": ids}).json()["text"] == "the quick brown fox"
    sampling = {"temperature": 0, "max_new_tokens": 4}
    by_text = live.post("/generate", {"text": "the quick brown fox", "sampling_params": sampling}).json()
    batch = live.post("/generate", {"input_ids": [ids, ids_of(9)], "sampling_params": sampling}).json()
    assert batch[0]["output_ids"] == by_text["output_ids"] and len(batch) == 2
    echo = live.post("/generate", {"input_ids": ids, "sampling_params": sampling, "return_prompt_token_ids": True}).json()
    assert echo["prompt_token_ids"] == ids


def test_chat_renders_answers_and_returns_ids(live: Live) -> None:
    body = {"messages": [{"role": "user", "content": "jumps"}], "max_tokens": 6, "temperature": 0, "logprobs": True}
    more = {"return_token_ids": True, "return_meta_info": True, "top_logprobs": 2}
    reply = live.post("/v1/chat/completions", body | more).json()
    choice = reply["choices"][0]
    rendered = live.post("/v1/tokenize", {"prompt": "<|im_start|>user\njumps<|im_end|>\n<|im_start|>assistant\n"}).json()
    assert choice["prompt_token_ids"] == rendered["tokens"]
    assert choice["response_token_ids"] == [entry[1] for entry in choice["meta_info"]["output_token_logprobs"]]
    assert len(choice["logprobs"]["content"]) == reply["usage"]["completion_tokens"]
    assert reply["metadata"]["weight_version"] == "base"
    same = live.post("/v1/chat/completions", body | {"input_ids": rendered["tokens"]}).json()
    assert same["choices"][0]["message"]["content"] == choice["message"]["content"]


def test_chat_streams_deltas_usage_and_refuses_ids_there(live: Live) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5, "temperature": 0, "seed": 3}
    whole = live.post("/v1/chat/completions", body).json()
    streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
    with httpx.stream("POST", live.url + "/v1/chat/completions", json=streamed, timeout=30) as reply:
        chunks = [json.loads(line[6:]) for line in reply.iter_lines() if line and "[DONE]" not in line]
    assert "".join(c["choices"][0]["delta"]["content"] for c in chunks[:-1]) == whole["choices"][0]["message"]["content"]
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert chunks[-2]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    refused = live.post("/v1/chat/completions", streamed | {"return_token_ids": True})
    assert refused.status_code == 400 and refused.json()["object"] == "error"


def test_information_routes(live: Live) -> None:
    assert httpx.get(live.url + "/ready").status_code == httpx.get(live.url + "/health", timeout=30).status_code == 200
    info = httpx.get(live.url + "/model_info").json()
    assert info["weight_version"] == "base" and info["architectures"] == ["LlamaForCausalLM"]
    server = httpx.get(live.url + "/server_info").json()
    assert server["context_length"] == 512 and server["batch_invariant"] is True
    models = httpx.get(live.url + "/v1/models").json()["data"]
    assert [model.get("parent") for model in models] == [None]
    assert httpx.get(live.url + "/nothing").status_code == 404


def test_keys_guard_normal_and_admin_routes(tiny, tmp_path) -> None:
    env = {"REEF_ENGINE_API_KEY": "user-key", "REEF_ENGINE_ADMIN_API_KEY": "admin-key"}
    engine = Live(tiny, tmp_path / "log", "--skip-invariance-check", env=env).wait()
    try:
        body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}
        user, admin = {"Authorization": "Bearer user-key"}, {"Authorization": "Bearer admin-key"}
        assert httpx.get(engine.url + "/ready").status_code == 200
        assert engine.post("/generate", body).status_code == 401
        assert engine.post("/generate", body).json() == {"error": "Unauthorized"}
        assert engine.post("/generate", body, headers=user).status_code == 200
        assert engine.post("/generate", body, headers=admin).status_code == 401
        assert engine.post("/flush_cache", headers=user).status_code == 401
        assert engine.post("/flush_cache", headers=admin).status_code == 200
        assert httpx.get(engine.url + "/model_info", headers=user).status_code == 200
        assert "admin-key" not in httpx.get(engine.url + "/server_info", headers=user).text
        assert "key" not in Path(f"/proc/{engine.process.pid}/cmdline").read_text()
    finally:
        engine.stop()
