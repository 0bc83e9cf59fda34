"""What clients see of a running server: plain HTTP, the OpenAI and the Anthropic SDK, receipts, records, releases."""

import json

import anthropic
import httpx
import openai
import pytest

from tests.e2e.server import Server, frames, reef, streamed


def record_of(server: Server, receipt: str) -> dict:
    return server.get(f"/reef/scenarios/default/records/{receipt}")


def test_the_few_lines_every_user_starts_with(server: Server) -> None:
    base_url, token, model = server.url, server.token, server.model
    messages = [{"role": "user", "content": "What is 3 + 4?"}]

    client = httpx.Client(base_url=base_url, headers={"Authorization": f"Bearer {token}"}, timeout=60)
    response = client.post("/v1/chat/completions", json={"model": model, "messages": messages})
    receipt = response.headers["x-reef-agent-record-id"]
    reported = client.post("/reef/report", json={"feedback": "wrong answer", "references": [receipt]})

    assert response.status_code == reported.status_code == 200
    assert reported.json()["eligible"] == [{"reference": receipt, "eligible": False, "reason": "no_recipe"}]
    record = record_of(server, receipt)
    assert record["id"] == receipt
    assert record["response"]["content"] == response.json()["choices"][0]["message"]["content"]
    client.close()


def test_every_answer_names_release_and_weights_and_its_record_has_the_tokens(server: Server) -> None:
    reply = server.ask("name them")
    head = server.head()
    assert reply.headers["x-reef-release-id"] == head and reply.headers["x-reef-weight-version"] == "base"
    record = record_of(server, reply.headers["x-reef-agent-record-id"])
    tokens = record["tokens"]
    assert record["release_id"] == head and record["weight_version"] == "base" and record["complete"] is True
    count = len(tokens["output_ids"])
    assert count == reply.json()["usage"]["completion_tokens"] == len(tokens["logprobs"]) == len(tokens["loss_mask"])
    assert [(span["version"], span["start"], span["end"]) for span in tokens["spans"]] == [("base", 0, count)]


def test_a_stream_ends_with_a_receipt_that_is_readable_at_once(server: Server) -> None:
    client = server.client()
    text, receipt, release = streamed(client, server.body("tell me", temperature=0))
    record = record_of(server, receipt)
    assert release == server.head() and record["stream"] is True and record["complete"] is True
    assert record["response"]["content"] == text
    whole = client.post("/v1/chat/completions", json=server.body("tell me", temperature=0)).json()
    assert whole["choices"][0]["message"]["content"] == text


def test_openai_sdk(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.token, max_retries=0) as client:
        assert server.model in [model.id for model in client.models.list()]
        ask = {"model": server.model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 10, "temperature": 0}
        raw = client.chat.completions.with_raw_response.create(**ask)
        whole = raw.parse().choices[0].message.content
        receipts, pieces = [], []
        for chunk in client.chat.completions.create(**ask, stream=True):
            pieces += [choice.delta.content or "" for choice in chunk.choices]
            receipts += [chunk.model_extra["reef"]["agent_record_id"]] if "reef" in (chunk.model_extra or {}) else []
    assert "".join(pieces) == whole and len(receipts) == 1
    assert {record_of(server, one)["dialect"] for one in (raw.headers["x-reef-agent-record-id"], *receipts)} == {"chat"}


def test_anthropic_sdk(server: Server) -> None:
    with anthropic.Anthropic(base_url=server.url, auth_token=server.token, api_key=None, max_retries=0) as client:
        ask = {"model": server.model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 10}
        ask["extra_body"] = {"temperature": 0}
        raw = client.messages.with_raw_response.create(**ask)
        whole = "".join(block.text for block in raw.parse().content)
        with client.messages.stream(**ask) as stream:
            pieces = list(stream.text_stream)
            receipt = stream.response.headers["x-reef-agent-record-id"]
    assert "".join(pieces) == whole
    assert (
        record_of(server, receipt)["dialect"]
        == record_of(server, raw.headers["x-reef-agent-record-id"])["dialect"]
        == "messages"
    )


def test_a_messages_stream_carries_the_receipt_on_its_last_event(server: Server) -> None:
    body = {"model": server.model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 6, "stream": True}
    with server.client().stream("POST", "/v1/messages", json=body) as reply:
        last = list(frames(reply))[-1]
    assert last["type"] == "message_stop" and last["reef"]["agent_record_id"] == reply.headers["x-reef-agent-record-id"]


def test_a_request_can_name_its_release(server: Server) -> None:
    head = server.head()
    client = server.client(**{"x-reef-release-id": head})
    assert client.post("/v1/chat/completions", json=server.body("pinned")).headers["x-reef-release-id"] == head
    unknown = server.client(**{"x-reef-release-id": "r7-00000000"}).post("/v1/chat/completions", json=server.body("pinned"))
    assert unknown.status_code == 404


def test_scenarios_come_with_their_first_request_and_are_apart(server: Server) -> None:
    reply = server.client(**{"x-reef-scenario": "support"}).post("/v1/chat/completions", json=server.body("hi"))
    receipt = reply.headers["x-reef-agent-record-id"]
    assert "support" in [row["name"] for row in server.get("/reef/scenarios")["scenarios"]]
    foreign = server.client(**{"x-reef-scenario": "default"}).post("/reef/report", json={"score": 1, "references": [receipt]})
    own = server.client().post("/reef/report", json={"score": 1, "references": [receipt]})
    assert foreign.status_code == 400 and own.status_code == 200 and own.json()["scenario"] == "support"


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer"}])
def test_no_token_no_answer(server: Server, headers: dict[str, str]) -> None:
    with httpx.Client(base_url=server.url, headers=headers) as client:
        assert client.post("/v1/chat/completions", json=server.body("x")).status_code == 401
        assert client.get("/healthz").status_code == client.get("/readyz").status_code == 200


def test_status_and_lists_from_the_command_line(server: Server) -> None:
    receipt = server.ask("for the list").headers["x-reef-agent-record-id"]
    status = reef("status", "--json", "--home", str(server.home))
    assert status.returncode == 0, status.stderr
    shown = json.loads(status.stdout)
    assert shown["pid"] == server.pid or shown.get("server", {}).get("pid") == server.pid, shown
    listed = reef("records", "list", "--json", "--home", str(server.home))
    assert listed.returncode == 0 and receipt in listed.stdout
    assert server.token not in status.stdout + listed.stdout
