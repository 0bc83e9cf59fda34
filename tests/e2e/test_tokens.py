"""Who may do what, from outside: spellings of a token, scopes, scenarios, episodes, rotation by file, rate, origins."""

import json
import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path

import httpx

from tests.doubles.upstream import Upstream
from tests.e2e.server import LIMIT_S, Server, reef, serving, until

DOCS = Path(__file__).parents[2] / "docs"
CHAT = "/v1/chat/completions"
ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def status(front: Server, path: str = "/reef/status", **headers: str) -> int:
    """By the standard library, which sends header values other clients refuse to send."""
    url = httpx.URL(front.url)
    with closing(HTTPConnection(url.host, url.port, timeout=LIMIT_S)) as connection:
        connection.request("POST" if path == CHAT else "GET", path, json.dumps(ASK) if path == CHAT else None, headers)
        return connection.getresponse().status


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@contextmanager
def granted(front: Server, *lines: str) -> Iterator[None]:
    """The token file with more lines; as before afterwards. The server reads it again by itself, within a second or so."""
    file = front.home / "token"
    before = file.read_text()
    file.write_text(before + "".join(f"{line}\n" for line in lines))
    probe = bearer(lines[0].split()[0])
    until(lambda: status(front, "/reef/harness", **probe) != 401, "the new token")
    try:
        yield
    finally:
        file.write_text(before)
        until(lambda: status(front, "/reef/harness", **probe) == 401, "the old tokens")


def test_a_start_without_a_terminal_prints_no_token(front: Server) -> None:
    said = front.output.read_text()
    assert str(front.home / "token") in said and front.token not in said


def test_the_scheme_has_no_case_and_the_token_has(front: Server) -> None:
    token = front.token
    for scheme in ("bearer", "BEARER", "BeArEr"):
        assert status(front, Authorization=f"{scheme} {token}") == 200
    swapped = token.swapcase()
    words = ("", "Bearer", "Bearer ", f"Basic {token}", f"BearerSecret {token}", f"Bearer{token}", token, f"Bearer {token} x")
    for wrong in (f"Bearer {swapped}", *words):
        assert status(front, Authorization=wrong) == 401, wrong
        assert status(front, CHAT, Authorization=wrong) == 401, wrong
        assert status(front, "/healthz", Authorization=wrong) == status(front, "/readyz", Authorization=wrong) == 200
    assert status(front) == 401 and status(front, "/healthz") == 200
    assert status(front, **{"x-api-key": token}) == 200
    assert status(front, **{"x-api-key": token, "Authorization": "Bearer no"}) == 401


OPEN = {"/healthz", "/readyz"}


def routes() -> list[tuple[str, str]]:
    """Every route of the HTTP page, with something in each of its places."""
    rows = re.findall(r"^\| `([A-Z]+)` \| `(/[^`]*)`", (DOCS / "http-api.md").read_text(encoding="utf-8"), re.MULTILINE)
    return [(method, re.sub(r"\{[^}]*\}", "0", path)) for method, path in rows]


def test_a_token_in_the_query_is_no_token(front: Server, provider: Upstream) -> None:
    found = routes()
    assert len(found) > 40 and ("GET", "/reef/harness/releases/0/page") in found
    before = front.get("/reef/scenarios")
    with httpx.Client(base_url=front.url, timeout=LIMIT_S) as nobody:
        for method, path in found:
            for name in ("token", "access_token", "api_key", "key"):
                reply = nobody.request(method, path, params={name: front.token}, json=None if method == "GET" else ASK)
                assert reply.status_code == (200 if path in OPEN else 401), (method, path, name)
    assert provider.seen == [] and front.get("/reef/scenarios") == before


def test_an_unset_token_variable_refuses_the_start(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("reef:\n  token: ${REEF_TEST_TOKEN_THAT_IS_NOT_SET}\n")
    ended = reef("serve", "-c", str(file), "--reef.home", str(tmp_path / "h"), "--reef.port", "0")
    assert ended.returncode == 2 and "REEF_TEST_TOKEN_THAT_IS_NOT_SET" in ended.stderr
    empty = {"REEF_TEST_TOKEN_THAT_IS_EMPTY": ""}
    for value in ("${REEF_TEST_TOKEN_THAT_IS_NOT_SET:-}", "${REEF_TEST_TOKEN_THAT_IS_EMPTY}", '""', '" "'):
        file.write_text(f"reef:\n  token: {value}\n")
        ended = reef("serve", "-c", str(file), "--reef.home", str(tmp_path / "h"), "--reef.port", "0", **empty)
        assert ended.returncode == 2 and "reef.token" in ended.stderr, (value, ended.stderr)


def test_rotation_scopes_scenarios_and_episodes_without_a_restart(front: Server, provider: Upstream) -> None:
    lines = (
        "reporter scopes=report",
        "bound scopes=infer,report scenario=mine",
        "episode scopes=infer scenario=mine episode=e7",
        "gone expires=1",
    )
    with granted(front, *lines):
        assert status(front, **bearer("gone")) == 401 and status(front, **bearer(front.token)) == 200

        def post(token: str, path: str, body: object = ASK, **headers: str) -> httpx.Response:
            return httpx.post(
                f"{front.url}{path}", json=body, headers={**bearer(token), **headers}, verify=False, timeout=LIMIT_S
            )

        assert post("reporter", CHAT).status_code == 403
        mine = post("bound", CHAT)
        assert mine.status_code == 200
        receipt = mine.headers["x-reef-agent-record-id"]
        assert front.get(f"/reef/scenarios/mine/records/{receipt}")["scenario"] == "mine"
        for path, headers in ((CHAT, {"x-reef-scenario": "theirs"}), ("/s/theirs/v1/chat/completions", {})):
            assert post("bound", path, **headers).status_code == 403
        for path in ("/reef/status", "/reef/scenarios", "/reef/scenarios/mine/records", "/reef/events", "/metrics"):
            assert status(front, path, **bearer("bound")) == 403, path
        assert post("bound", "/reef/report", {"score": 1, "references": [receipt]}).json()["scenario"] == "mine"

        trial = post("episode", CHAT, **{"x-reef-tag-trial": "none"})
        record = front.get(f"/reef/scenarios/mine/records/{trial.headers['x-reef-agent-record-id']}")
        assert (record["tags"]["trial"], record["session"]) == ("e7", "e7")
        assert post("episode", "/reef/report", {"score": 1, "references": [receipt]}).status_code == 403
    assert "theirs" not in [row["name"] for row in front.get("/reef/scenarios")["scenarios"]]
    assert post("bound", CHAT).status_code == 401, "taken out of the file, gone"
    assert not [line for line in lines if line.split()[0] in front.words().split('"')]


def test_rate_and_origins_of_a_deployment(double: Upstream, tmp_path: Path) -> None:
    listed = {"Origin": "https://ui.example"}
    settings = {"engine.kind": "upstream", "engine.url": double.url, "reef.rate_per_s": "1"}
    with serving(tmp_path / "h", Path("stub"), **settings, **{"reef.cors_origins": "https://ui.example"}) as server:
        client = server.client(**listed)
        replies = [client.post(CHAT, json=ASK) for _ in range(8)]
        refused = [reply for reply in replies if reply.status_code == 429]
        assert refused and {reply.status_code for reply in replies} == {200, 429}
        assert refused[0].headers["retry-after"] == "1" and "rate limit" in refused[0].json()["error"]["message"]
        assert {reply.headers["access-control-allow-origin"] for reply in replies} == {"https://ui.example"}
        assert client.get("/healthz").status_code == 200, "probes are free"
        asked = {"Access-Control-Request-Method": "POST"}
        assert client.options(CHAT, headers=asked).status_code == 204
        foreign = client.options(CHAT, headers={**asked, "Origin": "https://evil.example"})
        assert foreign.status_code != 204 and "access-control-allow-origin" not in foreign.headers
        pages: list[httpx.Response] = []
        until(
            lambda: pages.append(page := client.get("/reef/scenarios/default/records")) or page.status_code == 200,
            "room",
            every_s=0.5,
        )
        assert len(pages[-1].json()["records"]) == len(replies) - len(refused), "what was refused is not stored"


def test_no_page_may_call_unless_it_is_listed(front: Server) -> None:
    reply = front.client(Origin="https://ui.example").get("/reef/status")
    assert reply.status_code == 200 and not [name for name in reply.headers if name.startswith("access-control")]
