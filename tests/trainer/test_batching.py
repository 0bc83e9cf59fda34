"""Micro-batches: every action token addressed once, padding harmless, ranks in step."""

from hypothesis import given
from hypothesis import strategies as st

from reef_cli.core.ids import RecordId
from reef_cli.core.types import Sample, TokenSpan, TokenTrace
from reef_cli.trainer.batching import build

traces = st.tuples(st.integers(0, 5), st.lists(st.integers(0, 1), min_size=1, max_size=6))


def make(rows: list[tuple[int, list[int]]]) -> list[Sample]:
    samples = []
    for i, (prompt, mask) in enumerate(rows):
        n = len(mask)
        output = tuple(100 * (i + 1) + k for k in range(n))
        trace = TokenTrace(
            tuple(range(1, prompt + 1)), output, tuple(-0.5 - k for k in range(n)), tuple(mask), (TokenSpan("v", 0, n),)
        )
        samples.append(Sample(RecordId(str(i)), (), trace, 0.0, ("v",), i, 0.0))
    return samples


@given(st.lists(traces, min_size=1, max_size=9), st.integers(1, 4), st.integers(1, 3))
def test_every_action_token_once_over_all_ranks(rows: list[tuple[int, list[int]]], micro: int, world: int) -> None:
    samples = make(rows)
    batches = [build(samples, micro, rank=r, world_size=world) for r in range(world)]
    assert len({len(batch.micros) for batch in batches}) == 1
    seen: list[tuple[int, int]] = []
    for batch in batches:
        for m in batch.micros:
            assert m.input_ids.shape == m.attention_mask.shape and len(m.input_ids) >= 1
            for k in range(len(m)):
                position, offset = m.rows[int(m.row[k])], int(m.offset[k])
                trace = samples[position].tokens
                seen.append((position, offset))
                row, column = int(m.row[k]), int(m.column[k])
                assert int(m.targets[k]) == trace.output_ids[offset] == int(m.input_ids[row, column + 1])
                assert float(m.rollout_logprobs[k]) == trace.logprobs[offset]
                assert int(m.attention_mask[row, column + 1]) == 1
    expected = [(i, k) for i, (prompt, mask) in enumerate(rows) for k, action in enumerate(mask) if action and (prompt or k)]
    assert sorted(seen) == expected
    assert batches[0].tokens == len(expected)


@given(st.lists(traces, min_size=1, max_size=6), st.integers(1, 4))
def test_split_gives_each_sample_its_own_tokens(rows: list[tuple[int, list[int]]], micro: int) -> None:
    samples = make(rows)
    for m in build(samples, micro).micros:
        for position, targets in m.split(m.targets).items():
            assert all(int(token) // 100 == position + 1 for token in targets)


def test_lag_is_never_negative() -> None:
    batch = build(make([(1, [1]), (1, [1])]), 2, base_step=1)
    assert [batch.lag(i) for i in range(2)] == [1, 0]
    assert build(make([(1, [1])] * 3), 2, base_step=0).lag(2) == 0
