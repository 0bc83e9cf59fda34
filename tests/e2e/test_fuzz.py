"""Extreme and odd options before a real engine; part of the long run only (`make fuzz`)."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.e2e.server import Server, serving
from tests.gateway.fuzzing import EXAMPLES, LONG, Values

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not LONG, reason="make fuzz")]
Numbers = (
    st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**63), 2**64 - 1) | st.integers(-3, 30) | st.floats(0, 2)
)
NAMES = ("temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty", "repetition_penalty")
Options = st.dictionaries(st.sampled_from((*NAMES, "n", "max_tokens")), Numbers, max_size=4)
Biases = st.dictionaries(st.integers(-2, 500).map(str), Numbers, max_size=3)
Prompts = st.lists(st.integers(-2, 600) | Values, min_size=1, max_size=6)


@pytest.fixture(scope="module")
def engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, httpx.Client]]:
    with serving(tmp_path_factory.mktemp("fuzz") / "h", tiny_model) as server:
        yield server, server.client()
        assert server.status()["engine"]["restarts"] == 0
        log = (server.home / "logs" / "reef.log").read_text()
        assert "traceback" not in log.lower(), log[-4000:]


def sound(reply: httpx.Response) -> None:
    assert reply.status_code < 500, (reply.status_code, reply.text, reply.request.content)
    if reply.status_code == 200 and reply.headers["content-type"].startswith("text/event-stream"):
        assert b"[DONE]" in reply.content or b'"error"' in reply.content
    else:
        json.loads(reply.text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


@settings(max_examples=EXAMPLES // 5, deadline=None, suppress_health_check=list(HealthCheck))
@given(Options, Biases, st.booleans(), st.booleans())
def test_sampling(engine: tuple[Server, httpx.Client], options: dict[str, Any], bias: Any, stream: bool, scores: bool) -> None:
    body = {"max_tokens": 3, "n": 1, **options, "messages": [{"role": "user", "content": "hi"}], "logit_bias": bias}
    body |= {"model": "m", "stream": stream, "logprobs": scores}
    for name, most in (("n", 3), ("max_tokens", 4)):
        # Beyond these it is only slow, until it is refused or trimmed.
        body[name] = most if most < body[name] < 10_000 else body[name]
    sound(engine[1].post("/v1/chat/completions", json=body))


@settings(max_examples=EXAMPLES // 10, deadline=None, suppress_health_check=list(HealthCheck))
@given(Prompts)
def test_prompts(engine: tuple[Server, httpx.Client], prompt: list[Any]) -> None:
    content = json.dumps({"model": "m", "prompt": prompt, "max_tokens": 2})
    sound(engine[1].post("/v1/completions", content=content))
