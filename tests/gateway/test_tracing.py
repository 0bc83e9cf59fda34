"""Spans as a trace store gets them, through OpenTelemetry's own SDK: requests, generations, reports; never a body."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from reef_cli.core.errors import MissingDependency, UpstreamError
from reef_cli.telemetry import traces
from tests.gateway.fakes import AUTH
from tests.gateway.inference_kit import PATHS, ask, local, post, relaying

sdk = pytest.importorskip("opentelemetry.sdk.trace")
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Traced:
    """A tracer whose spans are kept."""

    def __init__(self) -> None:
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        self.exporter = InMemorySpanExporter()
        self.provider = sdk.TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = traces.OtelTracer(self.provider.get_tracer("reef"))

    def spans(self) -> dict[str, Any]:
        return {span.name: span for span in self.exporter.get_finished_spans()}


@pytest.fixture
def traced() -> Traced:
    return Traced()


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("dialect", list(PATHS))
async def test_a_generation_is_a_child_of_its_request(tmp_path: Path, traced: Traced, dialect: str, streams: bool) -> None:
    async with relaying(tmp_path, tracer=traced.tracer) as (made, _):
        limits = {"chat": {"max_completion_tokens": 64}, "responses": {"max_output_tokens": 64}}.get(dialect, {})
        body = ask(dialect, "very-private-words", stream=streams, temperature=0.5, **limits)
        _, headers, _ = await post(made, PATHS[dialect], body, Traceparent=PARENT, session_id="run-1")
    spans = traced.spans()
    request, generation = spans[f"POST {PATHS[dialect]}"], spans["chat m"]
    assert f"{request.context.trace_id:032x}" in PARENT and f"{request.parent.span_id:016x}" in PARENT
    assert generation.parent.span_id == request.context.span_id
    assert request.kind.name == "SERVER" and generation.kind.name == "CLIENT"
    assert request.attributes["http.response.status_code"] == 200 and request.attributes["http.route"] == PATHS[dialect]
    facts = dict(generation.attributes)
    assert facts.pop("gen_ai.response.finish_reasons") == ("stop",)
    assert ("gen_ai.response.time_to_first_chunk" in facts) == streams
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "upstream",
        "gen_ai.request.model": "m",
        "gen_ai.request.stream": streams,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": 64,
        "gen_ai.response.id": headers["x-reef-agent-record-id"],
        "gen_ai.conversation.id": "run-1",
        "gen_ai.usage.input_tokens": 100,
        "gen_ai.usage.output_tokens": 7,
        "gen_ai.usage.cache_read.input_tokens": 10,
        "reef.scenario": "s1",
        "reef.release_id": headers["x-reef-release-id"],
    }
    assert {name: facts.get(name) for name in expected} == expected
    assert request.start_time <= generation.start_time < generation.end_time <= request.end_time
    assert "very-private-words" not in str([(span.name, dict(span.attributes)) for span in spans.values()])


async def test_a_report_is_the_result_of_an_evaluation(tmp_path: Path, traced: Traced) -> None:
    async with relaying(tmp_path, tracer=traced.tracer) as (made, _):
        receipts = [(await post(made, PATHS["chat"], ask("chat")))[1]["x-reef-agent-record-id"] for _ in range(2)]
        body = {"score": 0.25, "feedback": "private opinion", "references": receipts, "agent_record_id": "r:1"}
        for _ in range(2):
            assert (await made.send("POST", "/reef/report", body))[0] == 200
    spans = [span for span in traced.exporter.get_finished_spans() if span.name == "POST /reef/report"]
    events = [event for span in spans for event in span.events]
    assert [event.name for event in events] == ["gen_ai.evaluation.result"] * 2, "told once, however often it is sent"
    assert [event.attributes["gen_ai.response.id"] for event in events] == receipts
    assert {event.attributes["gen_ai.evaluation.score.value"] for event in events} == {0.25}
    assert "private opinion" not in str([dict(event.attributes) for event in events])


async def test_what_fails_says_so(tmp_path: Path, traced: Traced) -> None:
    async with relaying(tmp_path, tracer=traced.tracer) as (made, up):
        up.replies(500, {"error": {"message": "boom"}})
        await post(made, PATHS["chat"], ask("chat"))
        await post(made, PATHS["chat"], [])
        async with made.client.get("/no/such/path", headers=AUTH):
            pass
    refused, wrong = (span for span in traced.exporter.get_finished_spans() if span.name == f"POST {PATHS['chat']}")
    assert (refused.attributes["http.response.status_code"], refused.status.status_code.name) == (502, "ERROR")
    assert (wrong.attributes["http.response.status_code"], wrong.status.status_code.name) == (400, "UNSET")
    generation = traced.spans()["chat m"]
    assert generation.attributes["error.type"] == UpstreamError.code and generation.status.status_code.name == "ERROR"
    assert "GET unknown" in traced.spans(), "paths of strangers are no names"


async def test_a_local_engine_names_its_weights_and_a_client_that_leaves_ends_the_span(tmp_path: Path, traced: Traced) -> None:
    async with local(tmp_path, "one two three four", tracer=traced.tracer) as (made, engine):
        await post(made, "/v1/completions", {"model": "m", "prompt": "x", "n": 1})
        engine.gap = 0.2
        body = ask("chat", stream=True)
        async with made.client.post(PATHS["chat"], json=body, headers={**AUTH, "x-reef-scenario": "s1"}) as answer:
            await answer.content.readany()
        await until_recorded(made)
    spans = traced.spans()
    assert spans["text_completion m"].attributes["reef.weight_version"] == "base"
    assert spans["chat m"].attributes["error.type"] == "client_disconnected"
    assert "POST /v1/chat/completions" in spans or spans["chat m"].parent is not None


async def until_recorded(made: Any) -> None:
    for _ in range(200):
        if made.records() == 2:
            return
        await asyncio.sleep(0.02)
    raise AssertionError("the broken answer was not recorded")


async def test_spans_reach_a_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exporter of the settings, over the wire."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from aiohttp import web
    from aiohttp.test_utils import TestServer

    got = asyncio.Event()

    async def take(request: web.Request) -> web.Response:
        assert b"POST /v1/x" in await request.read()
        got.set()
        return web.Response()

    app = web.Application()
    app.router.add_post("/v1/traces", take)
    async with TestServer(app) as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", str(collector.make_url("/")))
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
        tracer = traces.open_tracer(True)
        with tracer.span({}) as span:
            assert span is not None
            span.describe("POST /v1/x", {"a": 1, "b": None})
        await asyncio.wait_for(got.wait(), 20)


def test_tracing_is_off_or_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = traces.open_tracer(False)
    with quiet.span({}) as span:
        assert span is None and quiet.on is False
    quiet.finished("x", 1.0, {})
    quiet.event("x", {})

    def absent(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(traces, "import_module", absent)
    with pytest.raises(MissingDependency, match="OpenTelemetry"):
        traces.open_tracer(True)
