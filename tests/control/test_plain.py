"""Nothing that a model writes can drive a terminal."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reef_cli.control.plain import one_line, plain


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        ("\x1b[2J\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07text", "text"),
        ("\x1b]8;;http://evil\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x9b31mred", "red"),
        ("a\x08\x08b\x7f\x00", "ab"),
        ("safe\u202etxt.exe", "safetxt.exe"),
        ("tab\tand\nline\r\nend\r", "tab\tand\nline\nend"),
        ("ünïcödé 漢字 🙂", "ünïcödé 漢字 🙂"),
        ("\x1b", ""),
        ("\x1bPq#0;2\x1b\\x", "x"),
    ],
)
def test_sequences_and_controls_are_gone_and_text_stays(raw: str, clean: str) -> None:
    assert plain(raw) == clean


def test_one_line_folds_and_cuts() -> None:
    assert one_line(" a\n\n b\tc ") == "a b c"
    assert one_line("abcdef", 4) == "abc…"
    assert one_line(None) == "None"


@given(st.text())
def test_no_control_character_survives(text: str) -> None:
    clean = plain(text)
    assert not any((ord(char) < 32 and char not in "\n\t") or 0x7F <= ord(char) <= 0x9F for char in clean)
    assert plain(clean) == clean
