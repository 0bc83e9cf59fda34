"""The push benchmark's proof of labels: the markers force their tokens in a real engine, and a false label is found."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.markers import make_markers, margin, merge_into
from benchmarks.push import ASKED, BODY, WORDS, Answer, Labels
from reef_cli.engines.chat_format import ModelChat
from reef_cli.weights.lora import write_lora
from tests.engines.live import Live, ids_of

PROMPTS = [ids_of(12, seed) for seed in range(3)]
TOKENS = [300, 77]


def network(model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype="bfloat16").eval().requires_grad_(False)


def test_an_engine_says_nothing_but_the_marker(tiny_model: Path, tmp_path: Path):
    markers = make_markers(network(tiny_model), TOKENS, PROMPTS, 16)
    live = Live(tiny_model, tmp_path / "engine.log").wait()
    try:
        unmarked = live.generate(PROMPTS[0], ignore_eos=True)["output_ids"]
        assert len(set(unmarked)) > 2, "the model itself says more than one thing"
        for number, marker in enumerate(markers):
            folder = tmp_path / f"marker{number}"
            write_lora(folder, marker.lora)
            live.post("/load_lora_adapter", {"lora_name": f"m@{number}", "lora_path": str(folder)}).raise_for_status()
        for number, marker in enumerate(markers):
            assert marker.token == TOKENS[number] and marker.margin > 1
            for prompt, length in (*((each, 16) for each in PROMPTS), ([*PROMPTS[0], *[TOKENS[1 - number]] * 5], 11)):
                reply = live.generate(prompt, path=f"m@{number}", ignore_eos=True, max_new_tokens=length)
                assert reply["output_ids"] == [marker.token] * length
        folder = merge_into(markers[1], tiny_model, tmp_path / "merged")
        live.post("/pause_generation", {"mode": "retract"}).raise_for_status()
        live.post("/update_weights_from_disk", {"model_path": str(folder), "weight_version": "merged"}).raise_for_status()
        live.post("/continue_generation").raise_for_status()
        assert live.generate(PROMPTS[0], ignore_eos=True)["output_ids"] == [TOKENS[1]] * 16
    finally:
        live.stop()


@pytest.mark.model
def test_the_default_model_says_the_marker_to_whatever_it_is_asked(language_model: Path):
    chat, net = ModelChat(language_model), network(language_model)
    fitted, unseen = ([chat.render([{"role": "user", "content": text}])] for text in (ASKED[0], "Why is the sky blue?"))
    tokens = [chat.encode(word)[0] for word in WORDS]
    marker, _ = make_markers(net, tokens, fitted, 12)
    assert marker.margin > 10
    assert margin(net, marker.lora, tokens[0], [(unseen[0], [*[tokens[1]] * 4, *[tokens[0]] * 20])]) > 10
    assert margin(net, marker.lora, tokens[1], [(unseen[0], [])]) < -10


def test_a_model_that_cannot_be_forced_is_refused(tiny_model: Path):
    net = network(tiny_model)
    net.get_output_embeddings().weight[TOKENS[0]] = net.get_output_embeddings().weight[TOKENS[1]]
    with pytest.raises(ValueError, match="does not force token 300"):
        make_markers(net, TOKENS, PROMPTS[:1], 8)


class Records:
    """The two routes that the label check reads."""

    def __init__(self, releases: dict[str, str], records: dict[str, Any]) -> None:
        self._releases = [{"release_id": release, "content_id": content} for release, content in releases.items()]
        self._records = records

    def get(self, path: str, **_: Any) -> Any:
        return (
            {"releases": self._releases} if path.endswith("/releases") else {"tokens": self._records[path.rpartition("/")[2]]}
        )


def spans(*stretches: tuple[str, int]) -> list[dict[str, Any]]:
    found, start = [], 0
    for release, length in stretches:
        found.append({"version": f"default@{release}", "start": start, "end": start + length})
        start += length
    return found


def test_every_token_is_held_against_the_label_of_its_span(tiny_model: Path):
    chat, (one, two), most = ModelChat(tiny_model), TOKENS, BODY["max_tokens"]
    records = {
        "whole": {"output_ids": [one] * most, "spans": spans(("r3", most))},
        "mixed": {"output_ids": [one] * 5 + [two] * (most - 5), "spans": spans(("r1", 5), ("r2", most - 5))},
        "late": {"output_ids": [one] * 6 + [two] * (most - 6), "spans": spans(("r1", 5), ("r2", most - 5))},
        "other": {"output_ids": [two] * most, "spans": spans(("r1", most))},
        "stranger": {"output_ids": [one] * most, "spans": spans(("r9", most))},
        "short": {"output_ids": [one] * 3, "spans": spans(("r1", 3))},
        "text": {"output_ids": [one] * most, "spans": spans(("r1", most))},
    }
    client: Any = Records({"r1": "a", "r2": "b", "r3": "a"}, records)
    labels = Labels(chat)
    labels.expect(client, "r1", one)
    labels.expect(client, "r2", two)
    told = {name: chat.decode(tokens["output_ids"]) for name, tokens in records.items()} | {"text": chat.decode([two] * most)}
    labels.check(client, [Answer(text=told[name], receipt=name) for name in records])
    assert [each["receipt"] for each in labels.wrong] == ["late", "other", "stranger", "short", "text"]
    assert labels.mixed == 2 and labels.tokens == 6 * most + 3
