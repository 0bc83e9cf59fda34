"""The desk: what goes to the server for a try and a report, what is read of its state, and how long it waits."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from reef_cli.core.errors import NotRunning, TrainerError, UpstreamError
from reef_cli.discovery import desk as module
from reef_cli.discovery.archive import Rollout
from reef_cli.discovery.desk import Desk
from reef_cli.discovery.problem import Ask

TRY = Rollout(3, 1, 2, 7, "text", 2.5, True, "valid", "receipt-1")


@dataclass
class Answer:
    json: Any
    headers: Mapping[str, str] = field(default_factory=dict)


class Server:
    """Answers by path and keeps what it was sent."""

    def __init__(self, **answers: Any) -> None:
        self.answers = {"models": {"data": [{"id": "the-model"}]}, **answers}
        self.sent: list[tuple[str, str, Any, Mapping[str, str]]] = []

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Answer:
        if method == "POST" or path == "/reef/status":
            self.sent.append((method, path, body, headers or {}))
        found = self.answers[path.rsplit("/", 1)[-1]]
        found = found() if callable(found) else found
        return found if isinstance(found, Answer) else Answer(found)


def made(server: Server, **more: Any) -> Desk:
    return Desk(lambda: server, "s", **more)


def test_a_prompt_to_continue_goes_to_completions_and_a_message_to_chat() -> None:
    headers = {"x-reef-agent-record-id": "receipt-1", "x-reef-release-id": "r3"}
    server = Server(completions=lambda: Answer({"choices": [{"text": " 5 5", "message": {"content": "hello"}}]}, headers))
    desk = made(server, temperature=0.7)
    one = desk.propose(Ask("ROWS", max_tokens=9, stop=("\n",)), 2**40 + 5)
    assert (one.text, one.receipt, one.release) == (" 5 5", "receipt-1", "r3")
    assert desk.propose(Ask("Hi", chat=True), 1).text == "hello"
    (_, path, body, sent), (_, chat_path, chat, _) = server.sent
    assert path == "/v1/completions" and sent == {"x-reef-scenario": "s"}
    asked = {"model": "the-model", "prompt": "ROWS", "max_tokens": 9, "temperature": 0.7, "stop": ["\n"]}
    assert body == {**asked, "seed": (2**40 + 5) % 2**31}
    assert chat_path == "/v1/chat/completions" and chat["messages"] == [{"role": "user", "content": "Hi"}]
    assert "stop" not in chat and "seed" not in chat


def test_a_pinned_desk_asks_one_release_and_leaves_no_record() -> None:
    server = Server(completions={"choices": [{"text": "x"}]})
    made(server, pin="r0-abc").propose(Ask("x"), 0)
    assert server.sent[0][3] == {"x-reef-scenario": "s", "x-reef-release-id": "r0-abc", "x-reef-capture": "off"}


def test_an_answer_without_text_is_an_outage() -> None:
    with pytest.raises(UpstreamError, match="no text"):
        made(Server(completions={"choices": []})).propose(Ask("x"), 0)


def test_a_report_names_its_place_and_has_one_id_for_ever() -> None:
    server = Server(report={"eligible": [{"eligible": True, "reason": "eligible"}]})
    desk = made(server)
    assert desk.report(TRY, "run-1", learn=True) is None and desk.report(TRY, "run-1", learn=True) is None
    first, second = (body for _, _, body, _ in server.sent)
    assert first == second and first["score"] == 2.5 and first["references"] == ["receipt-1"]
    assert first["metadata"] == {"run": "run-1", "step": 3, "group": 1, "rollout": 2, "valid": True, "reason": "valid"}
    desk.report(TRY, "run-2", learn=False)
    assert (
        server.sent[2][2]["agent_record_id"] != first["agent_record_id"] and server.sent[2][2]["metadata"]["eligible"] is False
    )
    server.answers["report"] = {"eligible": [{"eligible": False, "reason": "outside_the_grid"}]}
    assert desk.report(TRY, "run-1", learn=True) == "outside_the_grid"


def row(**counts: int) -> dict[str, Any]:
    return {"scenarios": [{"name": "s", "head": "r1", "job": None, "phase": "", "counts": counts}]}


def test_the_standing_adds_up_what_met_its_fate_and_what_waits() -> None:
    now = made(Server(status=row(consumed=8, dropped=2, queued=3, reserved=1, refused=5))).standing()
    assert (now.head, now.samples_done, now.waiting, now.busy) == ("r1", 10, 4, False)
    with pytest.raises(UpstreamError, match="does not list"):
        made(Server(status={"scenarios": []})).standing()


def test_releases_are_compared_by_content() -> None:
    rows = [{"release_id": f"r{i}", "content_id": content} for i, content in enumerate(("a", "b", "b"))]
    desk = made(Server(releases={"releases": rows}))
    assert desk.same_weights("r1", "r2") and desk.same_weights("r1", "r1") and desk.same_weights(None, None)
    assert not desk.same_weights("r0", "r1") and not desk.same_weights("r9", "r8") and not desk.same_weights("r0", None)


def sequence(*answers: Any) -> Callable[[], Any]:
    left = list(answers)
    return lambda: left.pop(0) if len(left) > 1 else left[0]


def test_waiting_ends_when_the_samples_are_done_and_no_job_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.time, "sleep", lambda _: None)
    busy = row(consumed=6)
    busy["scenarios"][0]["job"] = {"id": "j"}
    server = Server(status=sequence(row(queued=6), row(reserved=6), busy, row(consumed=6)))
    waited: list[int] = []
    assert made(server).await_trained(0, 6, 60, lambda at: waited.append(at.waiting)).samples_done == 6
    assert waited == [6, 6, 0]
    with pytest.raises(TrainerError, match="not over"):
        made(Server(status=row(queued=6))).await_trained(0, 6, 0.0)


def test_a_server_that_is_away_for_a_moment_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.time, "sleep", lambda _: None)
    failures = iter([NotRunning("away"), NotRunning("away")])

    def status() -> Any:
        for error in failures:
            raise error
        return row(consumed=1)

    assert made(Server(status=status)).standing().samples_done == 1
    monkeypatch.setattr(module, "PATIENCE_S", -1.0)

    def gone() -> Any:
        raise NotRunning("gone")

    with pytest.raises(NotRunning):
        made(Server(status=gone)).standing()


def test_a_server_without_a_recipe_has_no_settings() -> None:
    assert made(Server(contract={"scenario": "s", "recipe": None})).settings() == {}
    found = made(Server(contract={"recipe": "tttd", "settings": {"group_size": 8}})).settings()
    assert found == {"group_size": 8, "recipe": "tttd"}
