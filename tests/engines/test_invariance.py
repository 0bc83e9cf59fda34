"""Bit-identical answers: alone or in company, with or without a cached prefix, whatever the chunking; LoRA rows included."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from reef_cli.engines.embedded.attention import Piece, plan
from reef_cli.engines.embedded.linear import rowwise
from reef_cli.engines.embedded.model import Model
from tests.engines.live import Live, ids_of


def facts(reply: dict) -> tuple:
    return reply["output_ids"], [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]]


def test_company_and_cache_change_no_bit(live: Live) -> None:
    prompts = [ids_of(5 + 23 * i, i) for i in range(12)]
    alone = []
    for prompt in prompts:
        live.post("/flush_cache")
        alone.append(facts(live.generate(prompt, max_new_tokens=40, ignore_eos=True)))
    live.post("/flush_cache")
    with ThreadPoolExecutor(12) as pool:
        run = lambda prompt: live.generate(prompt, max_new_tokens=40, ignore_eos=True)  # noqa: E731
        together = list(pool.map(run, prompts))
        cached = list(pool.map(run, prompts))
    assert [facts(reply) for reply in together] == alone
    assert [facts(reply) for reply in cached] == alone
    assert all(reply["meta_info"]["cached_tokens"] > 0 for reply in cached[1:])  # the first prompt is too short to copy


def test_a_conversation_continues_on_its_own_keys_without_changing_a_bit(live: Live) -> None:
    first = ids_of(50, 40)
    answer = live.generate(first, max_new_tokens=60, ignore_eos=True)["output_ids"]
    second = first + answer + ids_of(20, 41)
    warm = live.generate(second, max_new_tokens=30, ignore_eos=True)
    live.post("/flush_cache")
    cold = live.generate(second, max_new_tokens=30, ignore_eos=True)
    assert warm["meta_info"]["cached_tokens"] == len(first + answer) - 1 and cold["meta_info"]["cached_tokens"] == 0
    assert facts(warm) == facts(cold)


def test_a_fork_copies_the_shared_prefix_of_a_running_request(live: Live) -> None:
    live.post("/flush_cache")
    shared = ids_of(100, 50)
    with ThreadPoolExecutor(6) as pool:
        forks = [shared + ids_of(7, 60 + i) for i in range(6)]
        live.generate(shared, max_new_tokens=1)
        together = list(pool.map(lambda fork: live.generate(fork, max_new_tokens=50, ignore_eos=True), forks))
    assert sum(reply["meta_info"]["cached_tokens"] >= 100 for reply in together) >= 5
    live.post("/flush_cache")
    assert facts(live.generate(forks[3], max_new_tokens=50, ignore_eos=True)) == facts(together[3])


def test_sampling_with_a_seed_does_not_depend_on_company(live: Live) -> None:
    run = lambda i: facts(live.generate(ids_of(20, i), temperature=1.0, sampling_seed=i, max_new_tokens=30, ignore_eos=True))  # noqa: E731
    alone = [run(i) for i in range(6)]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(run, range(6))) == alone


@pytest.fixture(scope="module")
def model(tiny) -> Model:
    return Model(str(tiny), torch.bfloat16, 6, None, 16)


def test_any_chunking_gives_the_same_logits(model: Model) -> None:
    assert model.invariant()
    ids = ids_of(300, 70)
    whole = model.forward(ids, plan([], [Piece(0, 0, 300, 0)]), [], [299])
    for chunk in (1, 7, 64, 100, 299):
        for start in range(0, 300, chunk):
            end = min(start + chunk, 300)
            logits = model.forward(ids[start:end], plan([], [Piece(1, start, end, 0)]), [], [end - start - 1])
        assert torch.equal(logits, whole), chunk


def test_decoding_equals_prefilling(model: Model) -> None:
    ids = ids_of(200, 71)
    whole = model.forward(ids, plan([], [Piece(0, 0, 200, 0)]), [], list(range(200)))
    model.forward(ids[:120], plan([], [Piece(3, 0, 120, 0)]), [], [])
    for position in range(120, 200):
        logits = model.forward([ids[position]], plan([(3, position)], []), [], [0])
        assert torch.equal(logits[0], whole[position]), position


def test_flat_rows_equal_transformers_in_fp32(tiny) -> None:
    from transformers import AutoModelForCausalLM

    model = Model(str(tiny), torch.float32, 2, None, 16)
    ids = ids_of(150, 72)
    ours = model.forward(ids, plan([], [Piece(1, 0, 150, 0)]), [], list(range(150)))
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-3)


def test_a_sliding_window_model_equals_transformers(tmp_path) -> None:
    from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = MistralConfig(vocab_size=400, num_key_value_heads=1, sliding_window=20, max_position_embeddings=256, **sizes)
    MistralForCausalLM(config).save_pretrained(tmp_path)
    model = Model(str(tmp_path), torch.float32, 2, None, 16)
    ids = ids_of(90, 73)
    ours = model.forward(ids, plan([], [Piece(0, 0, 90, 0)]), [], list(range(90)))
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")(
            torch.tensor([ids])
        )
    torch.testing.assert_close(ours, theirs.logits[0], atol=2e-4, rtol=1e-3)
    last = model.forward([ids[-1]], plan([(0, 89)], []), [], [0])
    torch.testing.assert_close(last[0], theirs.logits[0, -1], atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("shape", [(576, 192), (1536, 64), (16, 576)])
def test_a_row_is_the_same_in_blocks_of_any_size(shape: tuple[int, int]) -> None:
    """Kernels that sum in another order differ in about one of 10,000 values, so there are many."""
    torch.manual_seed(0)
    inner, outer = shape
    weight = (torch.randn(outer, inner) / inner**0.5).bfloat16()
    rows = torch.randn(1200, inner).bfloat16()
    whole = rowwise(rows, weight)
    for size in (1, 2, 3, 5, 33, 34, 40, 64, 300):
        apart = torch.cat([rowwise(part, weight) for part in rows.split(size)])
        assert torch.equal(apart, whole), size
    torch.testing.assert_close(whole.float(), rows.float() @ weight.float().T, atol=3e-2, rtol=2e-2)
    assert rowwise(rows[:0], weight).shape == (0, outer)
