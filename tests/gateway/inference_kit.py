"""What the inference tests share: houses over a double of a provider or of an engine, captures, and readers of streams."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from reef_cli.config.schema import ReefSettings
from reef_cli.core.types import Inference
from reef_cli.gateway import sse
from reef_cli.gateway.backends.local import LocalBackend
from reef_cli.gateway.backends.upstream import UpstreamBackend
from reef_cli.gateway.deps import GatewayOptions
from reef_cli.telemetry.traces import NoTracer, Tracer
from tests.doubles.engine import ScriptedServing, WordChat
from tests.doubles.upstream import Upstream, upstream
from tests.gateway.fakes import AUTH, House, house

CAPTURES = Path(__file__).parent / "captures"
PATHS = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}
API = {"chat": "openai", "messages": "anthropic", "responses": "responses"}
H = {**AUTH, "x-reef-scenario": "s1", "Content-Type": "application/json"}
TOOL = {"type": "object", "properties": {"command": {"type": "string"}}}


@dataclass(frozen=True)
class Capture:
    """A real agent's request."""

    name: str
    path: str
    headers: dict[str, str]
    body: Any

    @property
    def dialect(self) -> str:
        path = self.path.partition("?")[0]
        return {path: dialect for dialect, path in PATHS.items()}.get(path, "count_tokens")


def captures() -> list[Capture]:
    found = []
    for file in sorted(CAPTURES.glob("*.json")):
        value = orjson.loads(file.read_bytes())
        headers = {name: text for name, text in value["headers"] if name.lower() not in _HOP}
        found.append(Capture(file.stem, value["path"], headers, value["body"]))
    return found


_HOP = (
    "host",
    "content-length",
    "connection",
    "authorization",
    "x-api-key",
    "x-reef-scenario",
    "transfer-encoding",
    "accept-encoding",
)


@asynccontextmanager
async def relaying(
    home: Path,
    api: str = "openai",
    *,
    key: str | None = "the-provider-key",
    options: GatewayOptions | None = None,
    tracer: Tracer | None = None,
    **more: Any,
) -> AsyncIterator[tuple[House, Upstream]]:
    """A gateway over a provider's double."""
    async with upstream() as double:
        backend = UpstreamBackend(double.url, api, key, **more)  # type: ignore[arg-type]
        facts = {"backend": backend, "engine_kind": "upstream", "tracer": tracer or NoTracer()}
        async with house(home, ReefSettings(), options or GatewayOptions(), **facts) as made:
            yield made, double
        await backend.close()


@asynccontextmanager
async def local(
    home: Path,
    text: str = "Hello from the engine.",
    *,
    chat: WordChat | None = None,
    options: GatewayOptions | None = None,
    tracer: Tracer | None = None,
) -> AsyncIterator[tuple[House, ScriptedServing]]:
    """A gateway over an engine's double."""
    template = chat or WordChat()
    serving = ScriptedServing(template, text)
    backend = LocalBackend(serving, template, model="tiny")
    facts = {"backend": backend, "tracer": tracer or NoTracer()}
    async with house(home, ReefSettings(), options or GatewayOptions(), **facts) as made:
        yield made, serving


def ask(dialect: str, text: str = "hi", **more: Any) -> dict[str, Any]:
    """A small request."""
    if dialect == "responses":
        return {"model": "m", "input": text, **more}
    limits = {"max_tokens": 64} if dialect == "messages" else {}
    return {"model": "m", "messages": [{"role": "user", "content": text}], **limits, **more}


def with_tool(dialect: str) -> dict[str, Any]:
    """The member that offers one tool named bash."""
    return {
        "tools": {
            "chat": [{"type": "function", "function": {"name": "bash", "parameters": TOOL}}],
            "messages": [{"name": "bash", "input_schema": TOOL}],
            "responses": [{"type": "function", "name": "bash", "parameters": TOOL}],
        }[dialect]
    }


async def post(made: House, path: str, body: Any, **headers: str) -> tuple[int, dict[str, str], bytes]:
    """Status, headers (lower case) and bytes of an answer."""
    raw = body if isinstance(body, bytes) else orjson.dumps(body)
    async with made.client.post(path, data=raw, headers={**H, **headers}) as answer:
        content = await answer.read()
        return answer.status, {name.lower(): value for name, value in answer.headers.items()}, content


def payloads(raw: bytes) -> list[Any]:
    """The JSON of a stream's events, `[DONE]` as text."""
    events = sse.events(raw)
    return [event.data.decode() if event.data == b"[DONE]" else orjson.loads(event.data) for event in events]


def stored(made: House, receipt: str, scenario: str = "s1") -> Inference:
    record = made.log.get(scenario, receipt)
    assert isinstance(record, Inference), "the receipt leads to an exchange"
    return record


def only(made: House, scenario: str = "s1") -> Inference:
    """The one record of a scenario."""
    rows = made.log.page(scenario)
    assert len(rows) == 1
    return stored(made, rows[0].id, scenario)
