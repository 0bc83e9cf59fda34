"""Errors on the wire: shape per dialect, the wording agents decide by, and what always accompanies a status."""

import re

import orjson
import pytest

from reef_cli.core import errors as core
from reef_cli.gateway import errors

FORBIDDEN = re.compile(
    r"server error|internal error|timeout|overloaded|rate limit|connection error|billing|429|500|502|503|504|524", re.IGNORECASE
)
TRANSIENT = re.compile(
    r"server error|internal error|timeout|overloaded|rate limit|connection error|try again|retry", re.IGNORECASE
)
LEAVES = [cls for cls in core.leaves() if cls.__module__ == core.__name__]
"""The closed list; rooms may refine a class for themselves, under its code."""


def make(cls: type[core.ReefError]) -> core.ReefError:
    return cls("scenario 's500-timeout' hit a rate limit", why="it was overloaded", hint="see billing 429")


@pytest.mark.parametrize("cls", LEAVES, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("dialect", ["openai", "anthropic"])
def test_wording_follows_the_status(cls: type[core.ReefError], dialect: errors.ErrorDialect) -> None:
    body = errors.error_body(dialect, make(cls), errors.new_request_id())
    text = body["error"]["message"]
    if errors.passing(cls.status):
        assert TRANSIENT.search(text)
    elif cls is not core.ContextOverflow:
        assert not FORBIDDEN.search(orjson.dumps(body).decode())


@pytest.mark.parametrize("cls", [cls for cls in LEAVES if errors.passing(cls.status)], ids=lambda cls: cls.__name__)
def test_a_passing_error_without_a_transient_word_gains_one(cls: type[core.ReefError]) -> None:
    assert TRANSIENT.search(errors.wording(cls("the disk is full")))


@pytest.mark.parametrize("cls", LEAVES, ids=lambda cls: cls.__name__)
def test_every_error_has_one_shape_per_dialect(cls: type[core.ReefError]) -> None:
    error = make(cls)
    openai = errors.error_body("openai", error, "req_a")
    assert set(openai) == {"error"}
    assert set(openai["error"]) == {"message", "type", "param", "code"}
    assert openai["error"]["code"] == cls.code
    anthropic = errors.error_body("anthropic", error, "req_a")
    assert anthropic["type"] == "error"
    assert anthropic["request_id"] == "req_a"
    assert set(anthropic["error"]) == {"type", "message"}
    reef = errors.error_body("reef", error, "req_a")
    assert reef["error"]["code"] == cls.code
    assert reef["error"]["request_id"] == "req_a"
    response = errors.error_response("reef", error, "req_a")
    assert response.status == cls.status
    assert response.headers["x-request-id"] == "req_a"
    assert ("retry-after" in response.headers) == (cls.status in (429, 503))
    assert ("WWW-Authenticate" in response.headers) == (cls.status == 401)


def test_codes_are_unique() -> None:
    codes = [cls.code for cls in LEAVES]
    assert len(codes) == len(set(codes))


def test_types_agents_know() -> None:
    def kind(dialect: errors.ErrorDialect, error: core.ReefError) -> str:
        return str(errors.error_body(dialect, error, "r")["error"]["type"])

    assert kind("openai", core.BodyTooLarge("x")) == kind("anthropic", core.BodyTooLarge("x")) == "request_too_large"
    assert kind("anthropic", core.RateLimited("x")) == "rate_limit_error"
    assert kind("anthropic", core.EngineUnavailable("x")) == "overloaded_error"
    assert kind("anthropic", core.UpstreamError("x")) == "api_error"
    assert kind("openai", core.UpstreamError("x")) == "server_error"
    assert kind("openai", core.AuthError("x")) == "authentication_error"
    assert kind("openai", core.InvalidRequest("x")) == "invalid_request_error"


def test_retry_after_is_small_whole_and_takes_the_errors_own() -> None:
    assert errors.retry_after(core.PushTimeout("x")) == "2"
    assert errors.retry_after(core.Draining("x")) == "5"
    assert errors.retry_after(core.RateLimited("x", retry_after_s=0.2)) == "1"
    assert errors.retry_after(core.EngineUnavailable("x", retry_after_s=3.1)) == "4"
    assert errors.retry_after(core.UpstreamError("x")) is None


def test_request_ids_never_look_like_a_status() -> None:
    for _ in range(500):
        assert re.fullmatch(r"req_[a-r]{24}", errors.new_request_id())
    assert errors.request_id_of({"x-request-id": "mine-1"}) == "mine-1"
    for bad in ("a500b", "x" * 65, "a b", "é", ""):
        assert errors.request_id_of({"x-request-id": bad}).startswith("req_")


@pytest.mark.parametrize(
    ("path", "headers", "dialect"),
    [
        ("/v1/messages", {}, "anthropic"),
        ("/v1/messages/count_tokens", {}, "anthropic"),
        ("/v1/chat/completions", {}, "openai"),
        ("/v1/models", {}, "openai"),
        ("/v1/models", {"anthropic-version": "2023-06-01"}, "anthropic"),
        ("/v1/nothing", {}, "openai"),
        ("/reef/report", {}, "reef"),
        ("/v10/x", {}, "reef"),
        ("/", {}, "reef"),
    ],
)
def test_dialect_of_a_path(path: str, headers: dict[str, str], dialect: str) -> None:
    assert errors.error_dialect(path, headers) == dialect


def test_context_overflow_uses_the_recognised_phrases() -> None:
    openai = errors.error_body("openai", errors.overflow(5003, 4096, "chat"), "r")["error"]
    assert openai["code"] == "context_length_exceeded"
    assert "maximum context length is 4096 tokens" in openai["message"]
    anthropic = errors.error_body("anthropic", errors.overflow(5003, 4096, "messages"), "r")["error"]
    assert "prompt is too long: 5003 tokens > 4096 maximum" in anthropic["message"]


def test_stream_frames() -> None:
    error = core.UpstreamError("the provider ended early")
    chat = errors.stream_error("chat", error, "r")
    assert chat.startswith(b"data: ")
    assert chat.endswith(b"\n\n")
    assert "upstream connection error" in orjson.loads(chat[6:])["error"]["message"]
    messages = errors.stream_error("messages", error, "r")
    head, data = messages.decode().strip().split("\n")
    assert head == "event: error"
    assert orjson.loads(data.removeprefix("data: "))["type"] == "error"
    frame = errors.stream_error("responses", error, "r", response={"id": "resp_1", "sequence_number": 7})
    head, data = frame.decode().strip().split("\n")
    assert head == "event: response.failed"
    payload = orjson.loads(data.removeprefix("data: "))
    assert payload["sequence_number"] == 7
    assert payload["response"]["id"] == "resp_1"
    assert payload["response"]["status"] == "failed"
    assert payload["response"]["error"]["code"] == "server_error"
    assert b"rate_limit_exceeded" in errors.stream_error("responses", core.RateLimited("x"), "r")
    assert b"context_length_exceeded" in errors.stream_error("responses", core.ContextOverflow("x"), "r")
    assert b"invalid_prompt" in errors.stream_error("responses", core.InvalidRequest("x"), "r")
