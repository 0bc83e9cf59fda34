"""Small collaborators of the gateway for tests: a backend that answers without a model, publishing without an engine, learning
without a worker. The experience log and the release service are the real ones."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp

from reef_cli.config.schema import ReefSettings
from reef_cli.core.errors import ReleaseNotServable
from reef_cli.core.ids import ReleaseId
from reef_cli.core.types import Artifact, Draft, Inference, Operation, Release, Surface
from reef_cli.experience.log import ExperienceLog
from reef_cli.gateway.app import Server, build_app, serve
from reef_cli.gateway.auth import TokenBook
from reef_cli.gateway.call import Call
from reef_cli.gateway.deps import Deps, GatewayOptions
from reef_cli.gateway.http import Request, StreamResponse
from reef_cli.gateway.outgoing import json_answer
from reef_cli.releases.service import ReleaseService
from reef_cli.telemetry.metrics import Metrics

TOKEN = "the-token-of-the-tests"
AUTH = {"Authorization": f"Bearer {TOKEN}"}


def list_of(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


class FakeBackend:
    """Answers `ok` and records it. `gate` holds answers back; `error` is raised instead of answering; `calls` counts."""

    def __init__(self) -> None:
        self.calls = 0
        self.gate: asyncio.Event | None = None
        self.error: Exception | None = None
        self.sessions: list[str | None] = []

    async def serve(self, call: Call) -> StreamResponse:
        self.calls += 1
        self.sessions.append(call.context.session)
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        context = call.context
        if context.capture:
            await call.deps.log.append(
                Inference(
                    id=context.receipt,
                    scenario=context.scenario,
                    created_at=call.created_at,
                    dialect=call.dialect,
                    model=call.model,
                    request=call.raw,
                    messages=[message for message in list_of(call.body.get("messages")) if isinstance(message, dict)],
                    response={"role": "assistant", "content": "ok"},
                    finish="stop",
                    release_id=ReleaseId(call.release.release_id),
                    session=context.session,
                    tags=dict(context.tags),
                )
            )
        context.waited(0.001)
        return json_answer({"id": context.receipt, "choices": []}, call.headers())

    async def count_tokens(self, request: Request, raw: bytes, body: Mapping[str, Any]) -> StreamResponse:
        return json_answer({"input_tokens": len(raw)}, {})

    async def models(self) -> Sequence[str]:
        return ["tiny"]

    async def close(self) -> None:
        pass


class FakePublishing:
    """The port over the real chain, with an engine that loads everything at once."""

    def __init__(self, releases: ReleaseService, base: Artifact) -> None:
        self._releases = releases
        self._base = base
        self.broken: Exception | None = None

    def open(self, scenario: str) -> Release:
        self._releases.create(scenario, self._base)
        return self.served(scenario)

    def served(self, scenario: str, surface: Surface = Surface.WEIGHTS) -> Release:
        head = self._releases.head(scenario, surface)
        assert head is not None
        return head

    async def publish(self, scenario: str, draft: Draft, expected_head: ReleaseId) -> Release:
        return await asyncio.to_thread(self._releases.publish, scenario, draft, expected_head)

    async def hold(self, scenario: str, draft: Draft, expected_head: ReleaseId) -> Release:
        return await asyncio.to_thread(self._releases.hold, scenario, draft, expected_head)

    async def promote(self, scenario: str, release_id: ReleaseId, expected_head: ReleaseId | None, author: str) -> Release:
        if self.broken is not None:
            raise self.broken
        return await asyncio.to_thread(self._releases.promote, scenario, release_id, expected_head, author)

    async def rollback(
        self,
        scenario: str,
        release_id: ReleaseId | None,
        expected_head: ReleaseId | None,
        author: str,
        evidence: Mapping[str, Any] | None = None,
        surface: Surface | None = None,
    ) -> Release:
        return await asyncio.to_thread(self._releases.rollback, scenario, release_id, expected_head, author, evidence, surface)

    async def resolve(self, scenario: str, pin: ReleaseId | None, session: str | None) -> Release:
        if pin is None:
            return await asyncio.to_thread(self.open, scenario)
        release = await asyncio.to_thread(self._releases.get, scenario, pin)
        if release.pending:
            raise ReleaseNotServable(f"{pin} is held and not loaded")
        return release


class FakeLearning:
    """Remembers who was woken; judges every receipt as told."""

    def __init__(self) -> None:
        self.woken: list[str] = []
        self.reason = "eligible"

    def wake(self, scenario: str) -> None:
        self.woken.append(scenario)

    def state(self, scenario: str) -> Mapping[str, Any]:
        return {"state": "collecting", "done": 1, "total": 4, "last_outcome": None}

    def eligibility(self, scenario: str, report_id: str) -> Mapping[str, str]:
        reason = self.reason

        class Same(dict[str, str]):
            def get(self, key: str, default: Any = None) -> Any:
                return reason

        return Same()


@dataclass(frozen=True)
class Client:
    """An HTTP client of one gateway; paths instead of addresses."""

    session: aiohttp.ClientSession
    server: Server

    @property
    def host(self) -> str:
        return self.server.host

    @property
    def port(self) -> int:
        return self.server.port

    def request(self, method: str, path: str, **more: Any) -> Any:
        return self.session.request(method, path, **more)

    def get(self, path: str, **more: Any) -> Any:
        return self.session.get(path, **more)

    def post(self, path: str, **more: Any) -> Any:
        return self.session.post(path, **more)

    def options(self, path: str, **more: Any) -> Any:
        return self.session.options(path, **more)

    def head(self, path: str, **more: Any) -> Any:
        return self.session.head(path, **more)

    def put(self, path: str, **more: Any) -> Any:
        return self.session.put(path, **more)

    def delete(self, path: str, **more: Any) -> Any:
        return self.session.delete(path, **more)

    def make_url(self, path: str) -> str:
        return f"{self.server.url}{path}"


class House:
    """One gateway with its collaborators, on a real socket."""

    def __init__(self, home: Path, settings: ReefSettings, options: GatewayOptions, **more: Any) -> None:
        self.log = ExperienceLog.open(home / "experience.db")
        self.releases = ReleaseService(home)
        model = home / "model"
        model.mkdir()
        (model / "config.json").write_text('{"model_type": "llama"}')
        (model / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
        self.base = self.releases.base_artifact(model)
        self.publishing = FakePublishing(self.releases, self.base)
        self.backend = FakeBackend()
        self.learning = FakeLearning()
        self.tokens = TokenBook([TOKEN])
        self.metrics = Metrics()
        self.home = home
        facts: dict[str, Any] = {
            "settings": settings,
            "engine_kind": "embedded",
            "model": "tiny",
            "log": self.log,
            "releases": self.releases,
            "publishing": self.publishing,
            "backend": self.backend,
            "tokens": self.tokens,
            "metrics": self.metrics,
            "learning": self.learning,
            "options": options,
            "create_scenario": self.create,
        }
        self.deps = Deps(**{**facts, **more})
        self.client: Client

    async def create(self, name: str) -> None:
        await self.log.scenarios.ensure(name, None, mode=self.deps.settings.training_mode)
        await asyncio.to_thread(self.publishing.open, name)

    async def get(self, path: str, **more: Any) -> Any:
        """The JSON of a successful GET."""
        async with self.client.get(path, headers=AUTH, **more) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()

    async def send(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> tuple[int, Any]:
        """Status and JSON of any request with the token."""
        content = {"data": body} if isinstance(body, bytes) else {"json": body} if body is not None else {}
        async with self.client.request(method, path, headers={**AUTH, **(headers or {})}, **content) as answer:
            return answer.status, await answer.json()

    async def chat(self, scenario: str = "s1", text: str = "hi", **headers: str) -> str:
        """One exchange; its receipt."""
        body = {"model": "tiny", "messages": [{"role": "user", "content": text}]}
        async with self.client.post(
            "/v1/chat/completions", json=body, headers={**AUTH, "x-reef-scenario": scenario, **headers}
        ) as answer:
            assert answer.status == 200, await answer.text()
            return answer.headers["x-reef-agent-record-id"]

    def records(self, scenario: str = "s1") -> int:
        return self.log.counts(scenario)["records"] if self.log.scenarios.find(scenario) else 0

    def draft(self, text: str) -> Draft:
        """A draft over a LoRA adapter of two numbers, with content of its own."""
        folder = self.home / f"artifact-{text}"
        folder.mkdir(exist_ok=True)
        names = ("base_model.model.layers.0.q_proj.lora_A.weight", "base_model.model.layers.0.q_proj.lora_B.weight")
        tensors = {name: {"dtype": "F32", "shape": [1, 1], "data_offsets": [4 * n, 4 * n + 4]} for n, name in enumerate(names)}
        header = json.dumps(tensors).encode()
        (folder / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 8)
        (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 1, "lora_alpha": 2, "note": text}))
        artifact = self.releases.store(folder, "lora")
        return Draft(artifact.content_id, "lora", Surface.WEIGHTS, Operation.TRAINING, "test", {"text": text})


@asynccontextmanager
async def house(
    home: Path, settings: ReefSettings | None = None, options: GatewayOptions | None = None, **more: Any
) -> AsyncIterator[House]:
    """A running gateway; everything is closed afterwards."""
    chosen = replace(settings or ReefSettings(), home=str(home))
    made = House(home, chosen, options or GatewayOptions(keep_alive_s=0.2), **more)
    server = await serve(build_app(made.deps), "127.0.0.1", 0)
    async with aiohttp.ClientSession(server.url, cookie_jar=aiohttp.DummyCookieJar()) as session:
        made.client = Client(session, server)
        yield made
    await server.close()
    await asyncio.to_thread(made.log.close)
