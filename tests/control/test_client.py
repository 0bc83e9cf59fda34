"""The client over real sockets: calls, errors that keep their class, lost servers, event streams."""

import socket
import threading
import time

import pytest

from reef_cli.control.client import Client, segment, with_query
from reef_cli.control.faults import error_of
from reef_cli.core.errors import (
    AuthError,
    HeadMoved,
    NotFoundError,
    NotRunning,
    ReefError,
    ScenarioNotFound,
    StorageError,
    UnavailableError,
    UpstreamError,
    UpstreamTimeout,
    UsageError,
    leaves,
)
from tests.control.fake_reef import TOKEN, FakeReef


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_call_sends_token_query_and_body_and_reads_json(reef: FakeReef) -> None:
    client = Client(reef.url, TOKEN)
    assert client.get("/reef/status")["version"] == "0.1.0"
    rows = client.get("/reef/scenarios/default/records", after_sequence=8, limit=5, request_type=None)["records"]
    assert [row["sequence"] for row in rows] == [9, 10]
    assert reef.asked("GET", "/reef/scenarios/default/records")[0][0] == {"after_sequence": "8", "limit": "5"}
    assert client.post("/reef/scenarios/default/pause")["paused"] is True
    assert reef.asked("POST", "/reef/scenarios/default/pause")[0][1] == {}
    client.close()


def test_errors_come_back_as_the_class_that_was_raised(reef: FakeReef) -> None:
    client = Client(reef.url, TOKEN)
    with pytest.raises(ScenarioNotFound) as missing:
        client.get("/reef/scenarios/nobody/releases")
    assert (missing.value.exit_code, missing.value.hint) == (3, "see: reef scenario list")
    with pytest.raises(HeadMoved) as moved:
        client.post("/reef/scenarios/default/promote", {"release_id": "r3-dddddddd", "expected_head": "r1-bbbbbbbb"})
    assert moved.value.exit_code == 4
    assert moved.value.details["head"] == "r2-cccccccc"
    with pytest.raises(AuthError) as refused:
        Client(reef.url, "wrong").get("/reef/status")
    assert refused.value.exit_code == 7
    assert "REEF_TOKEN" in refused.value.hint


@pytest.mark.parametrize("cls", [cls for cls in leaves() if cls.__module__ == "reef_cli.core.errors"])
def test_every_code_of_the_house_survives_the_wire(cls: type[ReefError]) -> None:
    import json

    sent = cls("what", why="why", hint="fix", head="r1")
    back = error_of(cls.status, json.dumps(sent.payload("q")).encode())
    assert type(back) is cls
    assert (back.message, back.why, back.hint, back.details) == ("what", "why", "fix", {"head": "r1"})
    assert back.exit_code == cls.exit_code


@pytest.mark.parametrize(
    ("status", "body", "cls"),
    [
        (404, b"", NotFoundError),
        (503, b"<html>", UnavailableError),
        (418, b"{}", ReefError),
        (429, b'{"type":"error","error":{"type":"rate_limit_error","message":"slow"}}', UnavailableError),
        (500, b'{"error": "text"}', ReefError),
        (400, b"[]", UsageError),
    ],
)
def test_foreign_errors_are_read_by_their_status(status: int, body: bytes, cls: type[ReefError]) -> None:
    assert isinstance(error_of(status, body), cls)


def test_named_errors_that_are_os_errors_are_not_mistaken_for_a_lost_connection(reef: FakeReef) -> None:
    for status, cls in ((507, StorageError), (504, UpstreamTimeout)):
        reef.overrides["GET", "/x"] = lambda *_, c=cls, s=status: (s, {"error": {"code": c.code, "message": "m"}})
        with pytest.raises(cls):
            Client(reef.url, TOKEN).get("/x")


def test_no_server_is_not_running_with_what_to_do() -> None:
    with pytest.raises(NotRunning) as caught:
        Client(f"http://127.0.0.1:{free_port()}").get("/reef/status")
    assert caught.value.exit_code == 6
    assert "reef serve" in caught.value.hint


def test_a_silent_server_is_unavailable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        started = time.monotonic()
        with pytest.raises(UnavailableError, match=r"silent for 0\.2 s"):
            Client(f"http://127.0.0.1:{mute.getsockname()[1]}", timeout_s=0.2).get("/")
        assert time.monotonic() - started < 2


def test_an_answer_that_is_not_json_is_said_to_be(reef: FakeReef) -> None:
    reef.overrides["GET", "/x"] = lambda *_: (200, b"<html>")
    with pytest.raises(UpstreamError, match="is not JSON"):
        Client(reef.url, TOKEN).get("/x")


def test_a_read_survives_a_connection_that_was_closed_meanwhile(reef: FakeReef) -> None:
    client = Client(reef.url, TOKEN)
    client.get("/reef/status")
    port = reef.port
    reef.close()
    again = FakeReef(port)
    try:
        assert client.get("/reef/status")["version"] == "0.1.0"
        assert len(again.requests) == 1
    finally:
        again.close()


def test_a_write_is_never_sent_twice(reef: FakeReef) -> None:
    client = Client(reef.url, TOKEN)
    client.get("/reef/status")
    port = reef.port
    reef.close()
    again = FakeReef(port)
    try:
        with pytest.raises(NotRunning):
            client.post("/reef/scenarios/default/pause")
        assert again.requests == []
        assert client.post("/reef/scenarios/default/pause")["paused"] is True
    finally:
        again.close()


def test_events_open_carry_cursors_and_resume(reef: FakeReef) -> None:
    client = Client(reef.url, TOKEN)
    events = client.events("7")
    assert next(events).kind == "open"
    reef.wait_for_stream()
    reef.push("job", "8", {"state": "training"})
    event = next(events)
    assert (event.kind, event.cursor, event.json()) == ("job", "8", {"state": "training"})
    assert reef.asked("GET", "/reef/events")[0][2]["last-event-id"] == "7"
    events.close()


def test_close_ends_a_stream_that_another_thread_reads(reef: FakeReef) -> None:
    client = Client(reef.url, TOKEN)
    ended = threading.Event()

    def read() -> None:
        try:
            for _ in client.events():
                pass
        except ReefError:
            pass
        ended.set()

    thread = threading.Thread(target=read)
    thread.start()
    reef.wait_for_stream()
    client.close()
    assert ended.wait(3)
    thread.join(3)


def test_the_token_is_not_sent_by_way_of_the_address() -> None:
    client = Client("http://user:pass@127.0.0.1:1/base/")
    assert client.url == "http://127.0.0.1:1/base"
    with pytest.raises(UsageError):
        Client("ftp://x")


def test_paths_are_quoted() -> None:
    assert segment("a/b ?") == "a%2Fb%20%3F"
    assert with_query("/x", {"a": True, "b": None, "c": "ä&"}) == "/x?a=true&c=%C3%A4%26"
    assert with_query("/x", {}) == "/x"
