"""Frames: every message survives the trip, floats are exact, and the end of the socket is recognised."""

import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reef_cli.core.errors import TrainerError
from reef_cli.core.ids import RecordId
from reef_cli.core.types import Sample, TokenSpan, TokenTrace
from reef_cli.trainer import protocol
from reef_cli.trainer.protocol import Channel, Done, Failed, Init, Message, Progress, Push, Ready, Score, Stop, Train

MESSAGES: list[Message] = [
    Init("/m", "a.b:C", {"lr": 1e-3}, {"rank": 4}, 7),
    Train("s", 3, None, "/c", (), "/out"),
    Push("s", "/d", "s@r1-00000000", "http://127.0.0.1:1", "key"),
    Score(None, ()),
    Stop(),
    Ready(1, {"device": "cpu"}),
    Progress("policy", 1, 2, 0.5),
    Done({"metrics": {"x": 1.5}}),
    Failed("what", "why", "hint", {"kind": "X"}, True),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_messages_survive_the_socket(message: Message) -> None:
    left, right = socket.socketpair()
    with left, right:
        Channel(left).send(message)
        received = Channel(right).receive()
    assert type(received) is type(message)
    assert protocol.encode(received) == protocol.encode(message)


def test_the_end_of_the_socket_is_none_also_in_the_middle_of_a_frame() -> None:
    for part in (b"", b"\0\0", struct.pack(">I", 100) + b"{"):
        left, right = socket.socketpair()
        with right:
            left.sendall(part)
            left.close()
            assert Channel(right).receive() is None


@pytest.mark.parametrize("body", [b"", b"[]", b'{"type": "nothing"}', b'{"type": "stop", "extra": 1}', b"\xff"])
def test_nonsense_is_a_trainer_error(body: bytes) -> None:
    with pytest.raises(TrainerError, match="malformed"):
        protocol.decode(body)


def test_an_absurd_length_is_refused_before_memory_is_taken() -> None:
    left, right = socket.socketpair()
    with left, right:
        left.sendall(struct.pack(">I", 2**32 - 1))
        with pytest.raises(TrainerError, match="malformed"):
            Channel(right).receive()


floats = st.floats(-50, 0)
tokens = st.integers(0, 50_000)


@given(st.lists(tokens, max_size=4), st.lists(st.tuples(tokens, floats), min_size=1, max_size=6), st.floats(-1, 1))
def test_samples_survive_json_exactly(prompt: list[int], output: list[tuple[int, float]], reward: float) -> None:
    n = len(output)
    trace = TokenTrace(
        tuple(prompt), tuple(t for t, _ in output), tuple(lp for _, lp in output), (1,) * n, (TokenSpan("v", 0, n),), 0.7
    )
    sample = Sample(RecordId("a"), (RecordId("b"),), trace, reward, ("v",), 3, 1.5, {"k": [1, "x"]})
    message = Train("s", 0, None, None, (protocol.sample_to_json(sample),), "/o")
    decoded = protocol.decode(protocol.encode(message)[4:])
    assert isinstance(decoded, Train)
    assert protocol.sample_from_json(decoded.samples[0]) == sample
