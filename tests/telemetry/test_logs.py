"""The log file: one JSON object a line, private, rotated, and never a secret in it."""

import json
import logging
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from reef_cli.telemetry import logs
from reef_cli.telemetry.secrets import credential_shaped, mask

KEY = "sk-" + "abcdEFGH1234567890xyz"


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    handler = logs.setup(tmp_path, "info", logs.Secrets(["hunter2-token", "no"]))
    yield tmp_path
    logs.close(handler)


def read(home: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (home / "logs" / "reef.log").read_text().splitlines()]


def test_lines_are_json_with_extras(home: Path) -> None:
    logging.getLogger("reef_cli.x").info("served %s", "r1", extra={"request_id": "req_a", "ms": 3, "ok": True, "none": None})
    logging.getLogger("reef_cli.x").debug("too quiet")
    (line,) = read(home)
    assert line["message"] == "served r1"
    assert (line["level"], line["logger"]) == ("info", "reef_cli.x")
    assert (line["request_id"], line["ms"], line["ok"], line["none"]) == ("req_a", 3, True, None)


def test_the_file_and_folder_are_private(home: Path) -> None:
    assert stat.S_IMODE((home / "logs" / "reef.log").stat().st_mode) == 0o600
    assert stat.S_IMODE((home / "logs").stat().st_mode) == 0o700


def test_secrets_are_masked_everywhere(home: Path) -> None:
    log = logging.getLogger("reef_cli.x")
    log.info("token hunter2-token and %s", KEY, extra={"header": "Authorization: Bearer hunter2-token", "nested": {"k": KEY}})
    try:
        raise ValueError(f"bad key {KEY}")
    except ValueError:
        log.exception("failed with hunter2-token")
    text = (home / "logs" / "reef.log").read_text()
    assert "hunter2" not in text
    assert "abcdEFGH" not in text
    assert text.count("[redacted]") >= 5
    assert "ValueError" in read(home)[1]["traceback"]  # type: ignore[operator]


def test_short_secrets_do_not_mask_words(home: Path) -> None:
    logging.getLogger("reef_cli.x").info("no problem")
    assert read(home)[0]["message"] == "no problem"


def test_rotation_keeps_private(tmp_path: Path) -> None:
    handler = logs.setup(tmp_path)
    handler.maxBytes = 500  # type: ignore[attr-defined]
    for number in range(20):
        logging.getLogger("reef_cli.x").info("line %d %s", number, "x" * 60)
    logs.close(handler)
    files = list((tmp_path / "logs").iterdir())
    assert len(files) > 1
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files)


@pytest.mark.parametrize(
    "text",
    [
        KEY,
        "ghp_" + "a1" * 18,
        "xoxb-" + "1234567890-abc",
        "AKIA" + "ABCDEFGH12345678",
        "Bearer abcdefgh12345678",
        "api_key=abcdefgh",
        '"token": "abcdefgh"',
        "password: correct-horse",
        "eyJhbGciOiJI.eyJzdWIiOiIx.abc123",
    ],
)
def test_credential_shapes(text: str) -> None:
    assert credential_shaped(f"before {text} after")
    masked = mask(f"before {text} after")
    assert masked.startswith("before ") and masked.endswith(" after")
    assert text not in masked


@pytest.mark.parametrize(
    "text", ["a plain sentence", "12 tokens: 5 read, 7 written", "sk-short", "the bearer of news", "r3-0a1b2c3d"]
)
def test_ordinary_text_is_left_alone(text: str) -> None:
    assert mask(text) == text
