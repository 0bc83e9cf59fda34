"""The outermost layer: authentication on every route, dialects of errors, sizes, slashes, draining, rates, origins."""

import asyncio
import gzip
import json
import logging
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from reef_cli.config.schema import ReefSettings
from reef_cli.core.errors import AlreadyRunning, ConfigError, ReefError, leaves
from reef_cli.core.types import Inference
from reef_cli.gateway.app import build_app, serve
from reef_cli.gateway.auth import Principal, Scope
from reef_cli.gateway.http import Response
from reef_cli.gateway.routes import all_routes
from tests.gateway.fakes import AUTH, TOKEN, House, house

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def concrete(path: str) -> str:
    """A route's path with something in its places."""
    for name in ("scenario", "record", "session", "release", "before", "after", "job", "model:.+"):
        path = path.replace("{" + name + "}", "s1")
    return path


ROUTES = [(method, concrete(path)) for method, path, _ in all_routes()]


@pytest.mark.parametrize(
    "headers", [{}, {"Authorization": ""}, {"Authorization": "Basic x"}, {"Authorization": f"Bearer {TOKEN}x"}]
)
async def test_every_route_but_the_probes_needs_a_token(reef: House, headers: dict[str, str]) -> None:
    for method, path in ROUTES:
        async with reef.client.request(method, f"{path}?token={TOKEN}", headers=headers) as answer:
            if path in ("/healthz", "/readyz"):
                assert answer.status == 200
                continue
            assert answer.status == 401, path
            assert answer.headers["WWW-Authenticate"].startswith("Bearer")
            body = await answer.json()
            assert (body.get("type") == "error") == path.startswith("/v1/messages")
            assert TOKEN not in await answer.text()


async def test_a_token_in_the_query_is_no_token(reef: House) -> None:
    for path in ("/reef/harness/releases/0/page", "/reef/nothing", "/metrics", "/reef/events", "/reef/harness/install"):
        async with reef.client.get(f"{path}?token={TOKEN}&access_token={TOKEN}&key={TOKEN}") as answer:
            assert answer.status == 401, path


@pytest.mark.parametrize("value", ["bearer", "BEARER", "BeArEr"])
async def test_scheme_case_over_the_wire(reef: House, value: str) -> None:
    async with reef.client.get("/reef/status", headers={"Authorization": f"{value} {TOKEN}"}) as answer:
        assert answer.status == 200
    async with reef.client.get("/reef/status", headers={"Authorization": f"{value} {TOKEN.upper()}"}) as answer:
        assert answer.status == 401
    async with reef.client.get("/reef/status", headers={"x-api-key": TOKEN}) as answer:
        assert answer.status == 200
    async with reef.client.get("/reef/status", headers={"x-api-key": TOKEN, "Authorization": "Bearer no"}) as answer:
        assert answer.status == 401


async def test_scoped_tokens(reef: House) -> None:
    infer = reef.tokens.issue([Scope.INFER], scenario="s1")
    async with reef.client.post("/v1/chat/completions", json=CHAT, headers={"x-api-key": infer}) as answer:
        assert answer.status == 200
    assert reef.records("s1") == 1, "the token's own scenario, not the default one"
    for path, extra, status in (
        ("/v1/chat/completions", {"x-reef-scenario": "s2"}, 403),
        ("/s/s2/v1/chat/completions", {}, 403),
        ("/reef/report", {}, 403),
        ("/reef/records", {}, 403),
    ):
        async with reef.client.post(path, json=CHAT, headers={"x-api-key": infer, **extra}) as answer:
            assert answer.status == status, path
    assert reef.log.scenarios.find("s2") is None
    async with reef.client.get("/reef/status", headers={"x-api-key": infer}) as answer:
        assert answer.status == 403
        assert (await answer.json())["error"]["code"] == "forbidden"


async def test_stream_is_true_or_false(reef: House) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"):
        for value in (1, 0, "true", "", [], {}, 1.5):
            status, body = await reef.send("POST", path, CHAT | {"stream": value})
            assert status == 400 and "`stream` must be true or false" in body["error"]["message"], (path, value)
    assert reef.backend.calls == 0
    for value in (True, False, None):
        assert (await reef.send("POST", "/v1/chat/completions", CHAT | {"stream": value}))[0] == 200


async def test_what_an_episode_makes_is_a_trial_whatever_it_says(reef: House) -> None:
    token = reef.tokens.issue([Scope.INFER], scenario="s1", episode="e7")
    for headers in ({}, {"x-reef-tag-trial": "no", "x-reef-tag-session": "mine", "x-reef-tag-colour": "red"}):
        async with reef.client.post("/v1/chat/completions", json=CHAT, headers={"x-api-key": token, **headers}) as answer:
            assert answer.status == 200
    first, second = (reef.log.get("s1", row.id) for row in reef.log.page("s1"))
    assert isinstance(first, Inference) and isinstance(second, Inference)
    assert (first.tags, first.session) == ({"trial": "e7"}, "e7")
    assert second.tags["trial"] == "e7" and second.tags["colour"] == "red" and second.session == "mine"


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/v1/chat/nothing", {}, 404),
        ("GET", "/v1/messages/nothing", {}, 404),
        ("GET", "/reef/nothing", {}, 404),
        ("GET", "/", {}, 404),
        ("GET", "/v1/chat/completions", {}, 405),
        ("PUT", "/v1/messages", {}, 405),
        ("PATCH", "/reef/status", {}, 405),
    ],
)
async def test_unknown_paths_and_methods(reef: House, method: str, path: str, headers: dict[str, str], status: int) -> None:
    async with reef.client.request(method, path, headers={**AUTH, **headers}) as answer:
        body = await answer.json()
        assert answer.status == status
        assert answer.headers["x-request-id"]
        assert ("Allow" in answer.headers) == (status == 405)
        if path.startswith("/v1/messages"):
            assert body["type"] == "error"
        else:
            assert body["error"]["code"] in ("route_not_found", "method_not_allowed")


@pytest.mark.parametrize(
    "path",
    [
        "//v1/chat/completions",
        "/v1//chat/completions",
        "/v1/chat//completions",
        "//v1//chat//completions",
        "/s/s1//v1/chat/completions",
    ],
)
async def test_doubled_slashes(reef: House, path: str) -> None:
    url = f"http://{reef.client.host}:{reef.client.port}{path}"
    async with reef.client.session.post(url, json=CHAT, headers={**AUTH, "x-reef-scenario": "s1"}) as answer:
        assert answer.status == 200


async def test_scenario_by_path(reef: House) -> None:
    async with reef.client.post("/s/by-path/v1/chat/completions", json=CHAT, headers=AUTH) as answer:
        assert answer.status == 200
    assert reef.records("by-path") == 1
    cases = [
        ("/s/a/v1/chat/completions", {"x-reef-scenario": "b"}, 400),
        ("/s//v1/chat/completions", {}, 400),
        ("/s/%20/v1/chat/completions", {}, 400),
        ("/s/a/reef/report", {}, 404),
        ("/s/a/v1", {}, 404),
    ]
    for path, headers, status in cases:
        async with reef.client.post(path, json=CHAT, headers={**AUTH, **headers}) as answer:
            assert answer.status == status, path
    assert [row.name for row in reef.log.scenarios.list()] == ["by-path"]
    async with reef.client.post("/s/a/v1/messages", data=b"[]", headers=AUTH) as answer:
        assert (await answer.json())["type"] == "error"


@pytest.mark.parametrize("body", [b"[]", b'{"messages": [', b"", b"null", b'"x"', b"\xff\xfe"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions"])
async def test_bad_inference_bodies_change_nothing(reef: House, path: str, body: bytes) -> None:
    async with reef.client.post(path, data=body, headers={**AUTH, "x-reef-scenario": "fresh"}) as answer:
        text = await answer.text()
        assert answer.status == 400
        assert "Traceback" not in text
    assert reef.backend.calls == 0
    assert reef.log.scenarios.find("fresh") is None
    async with reef.client.post(path, json=CHAT | {"input": "x", "prompt": "x", "max_tokens": 1}, headers=AUTH) as answer:
        assert answer.status == 200, "the connection stays usable"


async def test_missing_and_blank_scenario(tmp_path: Path) -> None:
    async with house(tmp_path, ReefSettings(default_scenario=None)) as reef:
        for path, body in (
            ("/v1/chat/completions", CHAT),
            ("/reef/report", {"score": 1, "references": []}),
            ("/reef/train", {"text": "x"}),
        ):
            for headers in ({}, {"x-reef-scenario": "  "}, {"x-reef-scenario": ""}):
                status, _ = await reef.send("POST", path, body, headers)
                assert status == 400, (path, headers)
        assert reef.log.scenarios.list() == []
        assert await reef.get("/reef/scenarios") == {"scenarios": []}


async def test_default_scenario_and_blank_header(reef: House) -> None:
    status, _ = await reef.send("POST", "/v1/chat/completions", CHAT)
    assert status == 200
    assert reef.records("default") == 1
    assert (await reef.send("POST", "/v1/chat/completions", CHAT, {"x-reef-scenario": "  "}))[0] == 400
    assert (await reef.send("POST", "/v1/chat/completions", CHAT, {"x-reef-scenario": " padded "}))[0] == 200
    for bad in ("a/b", "..", "x" * 65, "-x", "é"):
        status, answer = await reef.send("POST", "/v1/chat/completions", CHAT, {"x-reef-scenario": bad})
        assert (status, answer["error"]["code"]) == (400, "invalid_scenario"), bad
    assert [row.name for row in reef.log.scenarios.list()] == ["default", "padded"]


async def test_implicit_creation_switched_off(tmp_path: Path) -> None:
    async with house(tmp_path, ReefSettings(implicit_scenarios=False)) as reef:
        status, body = await reef.send("POST", "/v1/chat/completions", CHAT, {"x-reef-scenario": "s1x"})
        assert (status, body["error"]["code"]) == (404, "scenario_not_found")
        assert reef.log.scenarios.list() == []
        status, _ = await reef.send("POST", "/reef/scenarios", {"name": "s1x"})
        assert status == 201
        await reef.chat("s1x")


async def test_sessions_tags_capture_and_pins(reef: House) -> None:
    receipt = await reef.chat("s1", **{"x-reef-tag-Client": "me", "x-reef-tag-empty": " ", "x-reef-tag-session": "sess"})
    record: Any = reef.log.get("s1", receipt)
    assert record.tags == {"client": "me", "session": "sess"}
    assert record.session == "sess"
    body = CHAT | {
        "metadata": {"user_id": json.dumps({"device_id": "d", "session_id": "from-user"})},
        "prompt_cache_key": "pck",
    }
    await reef.send("POST", "/v1/chat/completions", body)
    await reef.send("POST", "/v1/chat/completions", body, {"session_id": "hdr"})
    await reef.send("POST", "/v1/chat/completions", body | {"metadata": {"user_id": "user_x_account__session_abc"}})
    await reef.send("POST", "/v1/chat/completions", body | {"metadata": {"user_id": "{broken"}})
    await reef.send("POST", "/v1/chat/completions", body | {"metadata": 7, "prompt_cache_key": 3})
    assert reef.backend.sessions[-5:] == ["from-user", "hdr", "abc", "pck", None]
    async with reef.client.post("/v1/chat/completions", json=CHAT, headers={**AUTH, "x-reef-capture": "off"}) as answer:
        assert answer.status == 200
        assert "x-reef-agent-record-id" not in answer.headers
    before = reef.records("default")
    for headers, status in (
        ({"x-reef-capture": "maybe"}, 400),
        ({"x-reef-release-id": "nonsense"}, 400),
        ({"x-reef-release-id": "r9-00000000"}, 404),
    ):
        assert (await reef.send("POST", "/v1/chat/completions", CHAT, headers))[0] == status
    assert reef.records("default") == before
    head = reef.publishing.served("default").release_id
    assert (await reef.send("POST", "/v1/chat/completions", CHAT, {"x-reef-release-id": head}))[0] == 200


async def test_sizes(tmp_path: Path) -> None:
    async with house(tmp_path, ReefSettings(body_limit_bytes=4 * 1024 * 1024)) as reef:
        large = {"messages": [{"role": "user", "content": "x" * (3 * 1024 * 1024)}]}
        assert (await reef.send("POST", "/v1/chat/completions", large, {"x-reef-scenario": "s1"}))[0] == 200
        record: Any = reef.log.get("s1", reef.log.page("s1")[0].id)
        assert record.messages[0]["content"] == large["messages"][0]["content"]
        status, body = await reef.send("POST", "/v1/chat/completions", b" " * (4 * 1024 * 1024 + 1))
        assert (status, body["error"]["type"]) == (413, "request_too_large")
        status, body = await reef.send("POST", "/v1/messages", b" " * (4 * 1024 * 1024 + 1))
        assert (status, body["error"]["type"]) == (413, "request_too_large")
        for path in ("/reef/records", "/reef/records/batch", "/reef/report", "/reef/train"):
            status, body = await reef.send("POST", path, b" " * (1024 * 1024 + 1))
            assert (status, body["error"]["code"]) == (413, "request_too_large"), path


async def test_the_import_limit_is_a_setting(tmp_path: Path) -> None:
    record = {
        "id": "large",
        "dialect": "chat",
        "model": "m",
        "request": {"messages": []},
        "response": {"content": "x" * 1_100_000},
    }
    headers = {"x-reef-scenario": "s1"}
    async with house(tmp_path, ReefSettings(import_limit_bytes=2_000_000)) as reef:
        assert (await reef.send("POST", "/reef/records", record, headers))[0] == 200
        record["response"]["content"] *= 2
        assert (await reef.send("POST", "/reef/records", record, headers))[0] == 413


async def test_a_chunked_body_is_bounded_too(tmp_path: Path) -> None:
    async def endless() -> Any:
        for _ in range(40):
            yield b"x" * 65536

    async with house(tmp_path) as reef, reef.client.post("/reef/report", data=endless(), headers=AUTH) as answer:
        assert answer.status == 413


async def test_compressed_bodies(reef: House) -> None:
    raw = json.dumps(CHAT).encode()
    packed = {"Content-Encoding": "gzip", "x-reef-scenario": "s1"}
    assert (await reef.send("POST", "/v1/chat/completions", gzip.compress(raw), packed))[0] == 200
    record: Any = reef.log.get("s1", reef.log.page("s1")[0].id)
    assert record.request == raw
    for encoding, data in (("gzip", b"junk"), ("br", raw), ("zstd", raw), ("nonsense", raw)):
        status, body = await reef.send("POST", "/v1/chat/completions", data, {"Content-Encoding": encoding})
        assert (status, body["error"]["type"]) == (400, "invalid_request_error"), encoding
    bomb = gzip.compress(b"\0" * 200_000_000, 9)
    assert (await reef.send("POST", "/v1/chat/completions", bomb, packed))[0] == 413
    assert reef.records("s1") == 1


async def test_draining_refuses_new_requests_and_lets_running_ones_finish(reef: House) -> None:
    reef.backend.gate = asyncio.Event()
    running = asyncio.create_task(reef.send("POST", "/v1/chat/completions", CHAT))
    while reef.backend.calls == 0:
        await asyncio.sleep(0.01)
    reef.deps.draining.start()
    async with reef.client.post("/v1/messages", json=CHAT, headers=AUTH) as answer:
        assert answer.status == 503
        assert answer.headers["retry-after"] == "5"
        assert (await answer.json())["error"]["type"] == "overloaded_error"
    async with reef.client.get("/readyz") as answer:
        assert answer.status == 503
        assert "retry-after" in answer.headers
    async with reef.client.get("/healthz") as answer:
        assert answer.status == 200
    assert (await reef.get("/reef/status"))["draining"] is True
    assert not await reef.deps.draining.idle(0.05)
    reef.backend.gate.set()
    assert (await running)[0] == 200
    assert await reef.deps.draining.idle(1)


async def test_not_ready(tmp_path: Path) -> None:
    async with house(tmp_path, ready=lambda: "the engine is starting") as reef:
        async with reef.client.get("/readyz") as answer:
            assert answer.status == 503
            assert "the engine is starting" in (await answer.json())["error"]["message"]
        assert (await reef.get("/reef/status"))["ready"] is False


async def test_an_unforeseen_failure_shows_no_traceback(reef: House, caplog: pytest.LogCaptureFixture) -> None:
    reef.backend.error = RuntimeError("secret detail")
    for path in ("/v1/chat/completions", "/v1/messages"):
        with caplog.at_level(logging.ERROR):
            status, body = await reef.send("POST", path, CHAT)
        assert status == 500
        assert "secret detail" not in json.dumps(body)
        assert "Traceback" not in json.dumps(body)
    assert "secret detail" in caplog.text
    reef.backend.error = ReefError("known")
    assert (await reef.send("POST", "/v1/chat/completions", CHAT))[0] == 500


async def test_logs_hold_no_bodies_and_no_tokens(reef: House, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        await reef.chat(text="very-private-words")
        await reef.send("POST", "/v1/chat/completions", b'{"x": very-private-words')
        async with reef.client.get("/reef/status", headers={"Authorization": "Bearer wrong-private-token"}):
            pass
    assert "very-private-words" not in caplog.text
    assert "private-token" not in caplog.text
    assert TOKEN not in caplog.text


async def test_rate_per_token(tmp_path: Path) -> None:
    async with house(tmp_path, ReefSettings(rate_per_s=2.0)) as reef:
        seen = [(await reef.send("GET", "/reef/status"))[0] for _ in range(6)]
        assert seen.count(200) in (4, 5)
        assert seen[-1] == 429
        async with reef.client.get("/reef/status", headers=AUTH) as answer:
            assert answer.headers["retry-after"] == "1"
        other = reef.tokens.issue([Scope.ADMIN])
        async with reef.client.get("/reef/status", headers={"x-api-key": other}) as answer:
            assert answer.status == 200, "another caller has its own bucket"
        async with reef.client.get("/healthz") as answer:
            assert answer.status == 200


async def test_origins(tmp_path: Path) -> None:
    listed = {"Origin": "https://ui.example"}
    async with house(tmp_path, ReefSettings(cors_origins=("https://ui.example",))) as reef:
        ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,x-reef-tag-a"}
        async with reef.client.options("/v1/chat/completions", headers={**listed, **ask}) as answer:
            assert answer.status == 204
            assert answer.headers["Access-Control-Allow-Origin"] == "https://ui.example"
            assert answer.headers["Access-Control-Allow-Headers"] == "authorization,x-reef-tag-a"
        for path, token, status in (
            ("/reef/status", AUTH, 200),
            ("/reef/status", {}, 401),
            ("/reef/events?after=0.0.0", AUTH, 200),
        ):
            async with reef.client.get(path, headers={**token, **listed}) as answer:
                assert answer.status == status
                assert answer.headers["Access-Control-Allow-Origin"] == "https://ui.example", path
                assert "x-reef-agent-record-id" in answer.headers["Access-Control-Expose-Headers"]
        for foreign in ("https://evil.example", "https://ui.example.evil", "null", "*"):
            async with reef.client.options("/reef/status", headers={"Origin": foreign, **ask}) as answer:
                assert answer.status == 401
                assert "Access-Control-Allow-Origin" not in answer.headers
            async with reef.client.get("/reef/status", headers={**AUTH, "Origin": foreign}) as answer:
                assert answer.status == 200 and "Access-Control-Allow-Origin" not in answer.headers
        async with reef.client.options("/reef/status", headers=listed) as answer:
            assert answer.status == 401, "only a preflight goes without a token"


async def test_no_origin_is_allowed_by_default(reef: House) -> None:
    async with reef.client.get("/reef/status", headers={**AUTH, "Origin": "https://ui.example"}) as answer:
        assert "Access-Control-Allow-Origin" not in answer.headers


async def test_a_key_of_a_link_admits_where_no_token_is_presented(tmp_path: Path) -> None:
    def admits(request: Any) -> Principal | None:
        return Principal("link", frozenset(), "s1") if request.query.get("key") == "good" else None

    async def page(request: Any) -> Any:
        return Response(text="page")

    extra = (("GET", "/reef/harness/page", page),)
    async with house(tmp_path, admits=admits, extra_routes=extra) as reef:
        for query, headers, status in (("?key=good", {}, 200), ("?key=bad", {}, 401), ("?key=good", {"x-api-key": "no"}, 401)):
            async with reef.client.get(f"/reef/harness/page{query}", headers=headers) as answer:
                assert answer.status == status
        async with reef.client.get("/reef/status?key=good") as answer:
            assert answer.status == 403


async def test_serving_on_a_socket(tmp_path: Path) -> None:
    async with house(tmp_path) as reef:
        server = await serve(build_app(reef.deps), "127.0.0.1", 0)
        assert server.port > 0
        async with aiohttp.ClientSession() as session, session.get(f"{server.url}/healthz") as answer:
            assert answer.status == 200
        with pytest.raises(AlreadyRunning, match=rf"port {server.port} .*taken by .*pid") as caught:
            await serve(build_app(reef.deps), "127.0.0.1", server.port)
        assert caught.value.details["port"] == server.port
        with pytest.raises(ConfigError):
            await serve(build_app(reef.deps), "203.0.113.7", 0)
        with pytest.raises(ConfigError):
            await serve(build_app(reef.deps), "no such host.invalid", 0)
        assert await server.drain(1)
        await server.close()
        with pytest.raises(aiohttp.ClientConnectorError):
            async with aiohttp.ClientSession() as session, session.get(f"{server.url}/healthz"):
                pass


async def test_sighup_reads_the_token_file_again(tmp_path: Path) -> None:
    import os
    import signal

    from reef_cli.gateway.auth import TokenBook

    file = tmp_path / "token"
    file.write_text("one\n")
    async with house(tmp_path, tokens=TokenBook(file=file)) as reef:
        server = await serve(build_app(reef.deps), "127.0.0.1", 0)
        async with reef.client.get("/reef/status", headers={"x-api-key": "one"}) as answer:
            assert answer.status == 200
        file.write_text("two\n")
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0.05)
        for token, status in (("one", 401), ("two", 200)):
            async with reef.client.get("/reef/status", headers={"x-api-key": token}) as answer:
                assert answer.status == status
        await server.close()


CLOSED = [cls for cls in leaves() if cls.__module__ == ReefError.__module__]


@pytest.mark.parametrize("path", ["/reef/scenarios/s1/evaluate", "/v1/messages", "/v1/chat/completions"])
async def test_every_code_over_the_wire(tmp_path: Path, path: str) -> None:
    async def evaluate(scenario: str, body: Any) -> Any:
        assert reef.backend.error is not None
        raise reef.backend.error

    async with house(tmp_path, evaluate=evaluate) as reef:
        await reef.chat()
        body = {"release_id": reef.publishing.served("s1").release_id} if path.startswith("/reef") else CHAT
        for cls in CLOSED:
            reef.backend.error = cls("it did not work", hint="look closer", head="r1-00000000")
            async with reef.client.post(path, json=body, headers={**AUTH, "x-reef-scenario": "s1"}) as answer:
                assert answer.status == cls.status, cls
                assert ("retry-after" in answer.headers) == (cls.status in (429, 503)), cls
                found = (await answer.json())["error"]
                assert "it did not work" in found["message"], cls
                if path.startswith("/reef"):
                    assert (found["code"], found["hint"]) == (cls.code, "look closer")
                    assert found["details"] == {"head": "r1-00000000"}
                    assert found["request_id"] == answer.headers["x-request-id"]
            assert f'reef_refused_total{{code="{cls.code}"}} 1' in reef.metrics.expose(), cls
