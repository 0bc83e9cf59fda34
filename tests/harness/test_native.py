"""The native agent's parts: tools that never raise, a harness read from files, patient calls."""

import ast
import json
import sys
import time
from pathlib import Path

import pytest

from reef_cli.harness.native import chat, tools
from reef_cli.harness.native.harness import Harness
from reef_cli.harness.native.loop import Session
from reef_cli.harness.resources import PACKAGE
from tests.harness.gateway import FakeGateway


def test_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REEF_TOKEN", "hidden")
    assert "wrote" in tools.call("write", {"path": "a/b.txt", "content": "one\ntwo\none\r\n"})
    assert tools.call("read", {"path": "a/b.txt", "offset": 2, "limit": 1}) == "two\n\n[1 more lines]"
    assert "occurs 2 times" in tools.call("edit", {"path": "a/b.txt", "old": "one", "new": "x"})
    assert "changed" in tools.call("edit", {"path": "a/b.txt", "old": "two", "new": "2"})
    assert (tmp_path / "a/b.txt").read_bytes() == b"one\n2\none\r\n"
    assert tools.call("bash", {"command": 'printf %s "$REEF_TOKEN"; exit 3'}) == "\n[exit status 3]"
    begun = time.monotonic()
    assert "killed after" in tools.call("bash", {"command": "sleep 60 & sleep 60", "timeout": 0.3})
    assert time.monotonic() - begun < 5
    for name, arguments in (
        ("dance", {}),
        ("read", {"path": "nope"}),
        ("read", []),
        ("read", {"wrong": 1}),
        ("edit", {"path": "a/b.txt", "old": "", "new": ""}),
    ):
        assert tools.call(name, arguments).startswith("error")
    assert "left out" in tools.shorten("x" * 50_000) and len(tools.shorten("x" * 50_000)) < 21_000


def test_harness_files_become_messages(tmp_path: Path) -> None:
    for path, text in {
        "AGENTS.md": "House rule.",
        "APPEND_SYSTEM.md": "Extra.",
        "settings.json": '{"rules_place": "user", "tools": []}',
        "skills/pdf/SKILL.md": '---\nname: "pdf"\ndescription: "Makes: \\"PDFs\\""\n---\n\nBody',
        "skills/odd/SKILL.md": '---\nname: "odd"\ndescription: "x"\ndisable-model-invocation: true\n---\n\nBody',
        "commands/greet.md": '---\ndescription: "d"\n---\n\nHello $1, all: $ARGUMENTS$3\n',
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    harness = Harness(tmp_path, tmp_path / "project")
    system = harness.system()
    assert "Extra." in system and 'pdf: Makes: "PDFs"' in system and "odd" not in system and "House rule." not in system
    assert harness.user("hi") == "hi\n\nHouse rule."
    assert harness.user("/greet Ada Lovelace").startswith("Hello Ada, all: Ada Lovelace\n")
    assert harness.user("/unknown x").startswith("/unknown x")
    (tmp_path / "settings.json").write_text("{broken")
    assert Harness(tmp_path, tmp_path).settings["rules_place"] == "system"


def test_a_conversation_and_its_file(tmp_path: Path, gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    gateway.replies = [[("write", {"path": "x", "content": "1"}), ("read", {"path": "x"})], "done"]
    session = Session(Harness(tmp_path / "h", tmp_path), gateway.url, "real-token", "m")
    assert session.ask("go") == "done"
    entries = [json.loads(line) for line in session.path.read_text().splitlines()]
    assert [entry.get("message", {}).get("role") for entry in entries] == [
        None,
        "system",
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
    ]
    gateway.fail = 400
    with pytest.raises(chat.ChatError, match="400: refused"):
        session.ask("again")
    assert json.loads(session.path.read_text().splitlines()[-1])["message"]["error"] == "400: refused"


def test_transient_failures_are_waited_for_and_final_ones_are_not(gateway: FakeGateway) -> None:
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            gateway.fail = None

    gateway.fail = 503
    assert chat.complete(gateway.url, "real-token", {"messages": []}, sleep)["choices"]
    assert pauses == [0.5, 1.0]
    with pytest.raises(chat.ChatError, match="connection error"):
        chat.complete("http://127.0.0.1:9", "t", {}, pauses.append)
    assert pauses[2:] == list(chat.PAUSES_S)


@pytest.mark.parametrize(
    "path",
    sorted([*(PACKAGE / "harness/client").glob("*.py"), *(PACKAGE / "harness/native").glob("*.py")]),
    ids=lambda p: f"{p.parent.name}/{p.name}",
)
def test_travelling_code_needs_only_an_old_python_and_its_library(path: Path) -> None:
    tree = ast.parse(path.read_text(), feature_version=(3, 9))
    for node in ast.walk(tree):
        names = (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom) and not node.level
            else []
        )
        assert all(name.split(".")[0] in sys.stdlib_module_names for name in names), names
        assert not isinstance(node, ast.Match)


def test_it_refuses_to_start_alone(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from reef_cli.harness.native.__main__ import main

    monkeypatch.delenv("REEF_BASE_URL", raising=False)
    monkeypatch.setenv("REEF_NATIVE_DIR", str(tmp_path))
    assert main(["-p", "x"]) == 2 and "REEF_BASE_URL" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
