"""Pure parts of the embedded engine: sampling, text, seats, layout, spans."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reef_cli.core.errors import InvalidRequest
from reef_cli.engines.embedded.attention import Piece, Slots, padded, plan
from reef_cli.engines.embedded.replies import spans
from reef_cli.engines.embedded.request import Request, Text, Wish
from reef_cli.engines.embedded.sampling import Choice, Row, choose, parse, uniform
from reef_cli.engines.embedded.seats import Seats, common_prefix

VOCAB = 50


def row(output: tuple[int, ...] = (), prompt: tuple[int, ...] = (1,), **params) -> Row:
    return Row(parse(params, VOCAB), prompt, output)


def logits(seed: int = 0) -> torch.Tensor:
    return torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


# Sampling


def test_sampling_follows_the_distribution() -> None:
    base = torch.tensor([[2.0, 1.0, 0.0] + [-30.0] * (VOCAB - 3)])
    expected = (base[0, :3] / 0.7).softmax(0)
    counts = torch.zeros(3)
    for step in range(4000):
        (choice,) = choose(base.clone(), [row((5,) * step, temperature=0.7, sampling_seed=9)])
        counts[choice.token] += 1
    assert torch.allclose(counts / 4000, expected, atol=0.03)


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.6}, {0}),
        ({"top_p": 0.7}, {0, 1}),
        ({"min_p": 0.3}, {0, 1}),
        ({"top_k": 3, "top_p": 0.6}, {0}),
    ],
)
def test_cuts_keep_exactly_what_they_say(params: dict, allowed: set[int]) -> None:
    base = torch.tensor([[2.0, 1.0, 0.0] + [-30.0] * (VOCAB - 3)])  # 0.665, 0.245, 0.090
    seen = {choose(base.clone(), [row(sampling_seed=seed, **params)])[0].token for seed in range(300)}
    assert seen == allowed


def test_logprobs_are_before_the_cut_and_after_temperature() -> None:
    base = logits()
    (choice,) = choose(base.clone(), [row(temperature=2.0, top_k=3, top_p=0.5, sampling_seed=1)])
    assert choice.logprob == pytest.approx(float((base[0] / 2).log_softmax(0)[choice.token]), abs=1e-6)
    (greedy,) = choose(base.clone(), [row(temperature=0)])
    assert greedy.token == int(base.argmax()) and greedy.logprob == pytest.approx(float(base[0].log_softmax(0).max()), abs=1e-6)


def test_penalties_bias_and_forbidden_tokens() -> None:
    base = torch.zeros(1, VOCAB)
    base[0, 4], base[0, 7] = 3.0, -1.0
    changed = base.clone()
    choose(changed, [row((4, 4, 7), (9,), temperature=0, frequency_penalty=0.5, presence_penalty=0.25)])
    assert changed[0, 4] == pytest.approx(3 - 2 * 0.5 - 0.25) and changed[0, 7] == pytest.approx(-1 - 0.5 - 0.25)
    changed = base.clone()
    choose(changed, [row((4, 7), (9,), temperature=0, repetition_penalty=2.0, logit_bias={"11": 5})])
    assert changed[0, 4] == 1.5 and changed[0, 7] == -2.0 and changed[0, 11] == 5.0
    forbidden = Row(parse({"temperature": 0}, VOCAB), (1,), (), forbidden=(4,))
    assert choose(base.clone(), [forbidden])[0].token != 4


def test_rows_do_not_influence_each_other() -> None:
    rows = [
        row(temperature=0),
        row(temperature=0.5, sampling_seed=3),
        row(top_k=3, sampling_seed=4),
        row(min_p=0.1, sampling_seed=5),
    ]
    together = choose(torch.cat([logits(i) for i in range(4)]), rows)
    assert together == [choose(logits(i), [each])[0] for i, each in enumerate(rows)]


@given(st.integers(0, 1 << 62), st.integers(0, 100_000))
def test_random_numbers_are_in_range_and_repeat(seed: int, step: int) -> None:
    assert 0 <= uniform(seed, step) < 1 and uniform(seed, step) == uniform(seed, step)


def test_random_numbers_are_spread() -> None:
    values = [uniform(seed, step) for seed in range(20) for step in range(200)]
    assert sum(values) / len(values) == pytest.approx(0.5, abs=0.02) and len(set(values)) == len(values)


_NAMES = st.sampled_from(["temperature", "top_p", "top_k", "stop", "logit_bias", "n", "max_new_tokens"])
_SHORT = st.text(max_size=2)
_ANYTHING = st.one_of(
    st.none(), st.integers(-5, 5), st.floats(), _SHORT, st.lists(st.integers(), max_size=2), st.dictionaries(_SHORT, _SHORT)
)


@given(st.dictionaries(_NAMES, _ANYTHING))
def test_any_parameters_are_taken_or_refused_by_name(raw: dict) -> None:
    try:
        params = parse(raw, VOCAB)
    except InvalidRequest:
        return
    assert params.max_new_tokens >= 1 and math.isfinite(params.temperature)


@pytest.mark.parametrize("weight", [3.4028235677973366e38, -1e10, float("nan"), float("inf")])
def test_a_bias_that_drowns_every_logit_is_refused(weight: float) -> None:
    with pytest.raises(InvalidRequest, match="logit_bias must be in"):
        parse({"logit_bias": {"0": weight}}, VOCAB)
    assert parse({"logit_bias": {"0": -1e9}}, VOCAB).logit_bias == ((0, -1e9),)


# Text


def _bytes(ids: list[int], skip: bool) -> str:
    return bytes(ids).decode("utf-8", "replace")


@given(st.text(min_size=1, max_size=30))
def test_incremental_text_equals_the_whole_and_never_takes_back(text: str) -> None:
    raw = list(text.encode())
    tail, before = Text(_bytes, True), ""
    for end in range(1, len(raw) + 1):
        now = tail.feed(raw[:end])
        assert now.startswith(before)
        before = now
    assert tail.feed(raw, final=True) == text


def _request(stop: tuple[str, ...] = (), **params) -> tuple[Request, list[str]]:
    shown: list[str] = []
    wish = Wish("r", [1], parse({"stop": list(stop), "max_new_tokens": 100} | params, 256))
    return Request(wish, Text(_bytes, True), lambda progress: shown.append(progress.text)), shown


def _feed(request: Request, text: str) -> None:
    for byte in text.encode():
        if request.finish is None:
            request.take(Choice(byte, -0.5), "w", frozenset({0}), 1000)
            request.report()


def test_text_that_may_begin_a_stop_string_is_held_back() -> None:
    request, shown = _request(("STOP", "ST!"))
    _feed(request, "a ST")
    assert shown[-1] == "a "
    _feed(request, "ab STOP tail")
    assert request.visible == "a STab " and request.finish == {"type": "stop", "matched": "STOP"}
    assert len(request.output_ids) == len("a STab STOP")
    assert all(request.visible.startswith(text) for text in shown)


@given(st.text(alphabet="abX", max_size=30), st.sampled_from(["ab", "aXa", "XX", "bbb"]))
def test_stop_strings_cut_at_their_first_appearance(text: str, stop: str) -> None:
    request, shown = _request((stop,))
    _feed(request, text)
    if stop in text:
        assert request.visible == text[: text.index(stop)] and request.finish is not None
    else:
        request.abort("end")
        assert request.visible == text
    assert all(request.visible.startswith(each) for each in shown)


def test_length_context_and_end_tokens_finish() -> None:
    request, _ = _request(max_new_tokens=2)
    _feed(request, "abc")
    assert request.finish == {"type": "length", "length": 2} and request.visible == "ab"
    request, _ = _request()
    for byte in b"abcd":
        request.take(Choice(byte, -1.0), "w", frozenset(), 4)
        if request.finish:
            break
    assert request.finish == {"type": "length", "length": 3}
    request, _ = _request(stop_token_ids=[ord("c")])
    _feed(request, "abcd")
    assert request.finish == {"type": "stop", "matched": ord("c")} and request.visible == "ab"


@given(st.lists(st.sampled_from("abc"), max_size=20))
def test_spans_cover_every_token_once(versions: list[str]) -> None:
    made = spans(versions)
    assert [span["version"] for span in made for _ in range(span["start"], span["end"])] == versions
    assert all(a["version"] != b["version"] and a["end"] == b["start"] for a, b in pairwise(made))


# Seats


@given(st.lists(st.integers(0, 2), max_size=300), st.lists(st.integers(0, 2), max_size=300))
def test_the_common_prefix_is_the_longest(a: list[int], b: list[int]) -> None:
    length = common_prefix(a, b)
    assert a[:length] == b[:length] and (length in (len(a), len(b)) or a[length] != b[length])


def _asking(ids: list[int]) -> Request:
    return Request(Wish("r", ids, parse({}, VOCAB)), Text(_bytes, True), lambda _: None)


class _World:
    """Seats over slots whose keys are the tokens themselves."""

    def __init__(self, count: int) -> None:
        self.slots: list[list[int]] = [[] for _ in range(count)]
        self.seats = Seats(count, self._copy)

    def _copy(self, source: int, target: int, length: int) -> None:
        self.slots[target] = self.slots[source][:length]

    def run(self, request: Request, key: tuple[int, int]) -> int:
        seat = self.seats.take(request, key, request.length - 1)
        assert seat is not None
        assert self.slots[seat.slot][: request.filled] == request.tokens[: request.filled]
        self.slots[seat.slot] = list(request.tokens)
        seat.tokens = list(request.tokens)
        return request.filled


@settings(max_examples=200)
@given(st.data())
def test_reuse_never_serves_keys_of_other_tokens_or_weights(data: st.DataObject) -> None:
    """Whatever comes and goes, reused keys are those of the same tokens; across keys nothing is ever reused."""
    world, running, epoch = _World(3), [], 0
    keys: dict[int, tuple[int, int]] = {}
    for _ in range(data.draw(st.integers(1, 15))):
        action = data.draw(st.sampled_from(["ask", "end", "forget", "discard"]))
        if action == "ask" and len(running) < 3:
            base = data.draw(st.sampled_from([list(range(20)), list(range(5, 40)), [7] * 30]))
            ids = base[: data.draw(st.integers(1, len(base)))] + data.draw(st.lists(st.integers(0, 3), max_size=5))
            request, key = _asking(ids), (data.draw(st.integers(0, 1)), epoch)
            before = {slot: tokens for slot, tokens in enumerate(map(list, world.slots)) if keys.get(slot) == key}
            reused = world.run(request, key)
            assert reused <= max((common_prefix(tokens, ids) for tokens in before.values()), default=0)
            keys[request.slot] = key
            running.append(request)
        elif running and action in ("end", "discard"):
            request = running.pop(data.draw(st.integers(0, len(running) - 1)))
            (world.seats.leave if action == "end" else world.seats.discard)(request)
        elif action == "forget":
            epoch += 1
            world.seats.forget()


def test_a_full_house_seats_nobody_and_a_cheap_takeover_beats_a_copy() -> None:
    world = _World(2)
    first, second = _asking(list(range(30))), _asking([9] * 30)
    assert world.run(first, (0, 0)) == world.run(second, (0, 0)) == 0
    assert world.seats.take(_asking([1]), (0, 0), 0) is None
    world.seats.leave(first)
    again = _asking([*range(30), 31, 32])
    assert world.run(again, (0, 0)) == 30 and again.slot == 0
    assert world.seats.cached_tokens == 0


# Layout


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 300)), unique_by=lambda each: each[0], max_size=8),
    st.integers(0, 200),
    st.integers(1, 200),
)
def test_a_plan_covers_every_row_once_at_the_length_of_its_position(
    decodes: list[tuple[int, int]], start: int, count: int
) -> None:
    decodes.sort()
    made = plan(decodes, [Piece(12, start, start + count, len(decodes))])
    covered: dict[int, int] = {}
    for run in made.decodes:
        for offset in range(run.count):
            assert decodes[run.row + offset][0] == run.slot + offset
            covered[run.row + offset] = run.length
    for tile in made.pieces:
        assert tile.slot == 12
        for offset in range(tile.count):
            assert tile.start + offset - start == tile.row + offset - len(decodes)
            covered[tile.row + offset] = tile.length
    assert len(covered) == len(decodes) + count
    positions = made.positions.tolist()
    assert all(length == padded(positions[each] + 1) for each, length in covered.items())


def test_slots_copy_and_give_memory_back() -> None:
    slots = Slots(2, 3, 2, 100, 8, torch.bfloat16)
    slots.keys[1][0, :, :50] = 3.0
    slots.copy(0, 2, 40)
    assert slots.keys[1][2, :, :40].min() == 3 and slots.keys[1][2, :, 40:].abs().max() == 0
    slots.release()
    assert slots.keys[1].abs().max() == 0 and slots.capacity == 128
