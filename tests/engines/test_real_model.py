"""The default language model through the real engine: sense, agreement with transformers, invariance, templates."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from reef_cli.core.errors import ModelNotFound
from reef_cli.engines.chat_format import ModelChat
from reef_cli.engines.models import ModelStore
from tests.engines.live import Live

pytestmark = pytest.mark.model
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def folder() -> Path:
    named = os.environ.get("REEF_TEST_MODEL", "smollm2-135m-instruct")
    try:
        return ModelStore().resolve(named)
    except ModelNotFound as error:
        pytest.skip(f"{error.message}: {error.hint}")


@pytest.fixture(scope="module")
def engine(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    made = Live(folder, tmp_path_factory.mktemp("real") / "log").wait(120)
    yield made
    made.stop()


def test_it_answers(engine: Live) -> None:
    reply = engine.post("/v1/chat/completions", {"messages": QUESTION, "max_tokens": 30, "temperature": 0}).json()
    assert "Paris" in reply["choices"][0]["message"]["content"] and reply["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("messages", [QUESTION, [{"role": "system", "content": "Be brief."}, *QUESTION]])
def test_rendering_equals_transformers(folder: Path, messages: list) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ModelChat(folder).render(messages) == list(expected)


def test_greedy_logprobs_agree_with_transformers(engine: Live, folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    ids = ModelChat(folder).render(QUESTION)
    reply = engine.generate(ids, max_new_tokens=24, ignore_eos=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.no_grad():
        logprobs = model(torch.tensor([ids + reply["output_ids"]])).logits[0].float().log_softmax(-1)
    differences = [
        abs(value - float(logprobs[position, token]))
        for position, (value, token, _) in enumerate(reply["meta_info"]["output_token_logprobs"], start=len(ids) - 1)
    ]
    assert sum(differences) / len(differences) < 0.05


def test_company_changes_no_bit(engine: Live, folder: Path) -> None:
    chat = ModelChat(folder)
    prompts = [chat.render([{"role": "user", "content": f"Count from {i} to {i + 9}." + " Please." * i}]) for i in range(8)]
    run = lambda ids: engine.generate(ids, max_new_tokens=24, ignore_eos=True)["meta_info"]["output_token_logprobs"]  # noqa: E731
    alone = []
    for prompt in prompts:
        engine.post("/flush_cache")
        alone.append(run(prompt))
    engine.post("/flush_cache")
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(run, prompts)) == alone
        assert list(pool.map(run, prompts)) == alone
