"""The HTTP page names exactly the routes that exist, and every header, field and reason it lists is in the code."""

import re
import sys

from tests.docs.pages import ROOT, blocks, prose

sys.path.insert(0, str(ROOT / "scripts"))
from docs_pages.routes import every_route

PAGE = ROOT / "docs" / "http-api.md"
_NAMED = re.compile(r"`(GET|POST|PUT|DELETE) (/[^`?\s]*)[^`]*`")
_PATH = re.compile(r"https?://127\.0\.0\.1:8900(/[^\s\"'?]*)")


def mounted() -> set[tuple[str, str]]:
    return {(method, path) for method, path, _ in every_route()}


def text_without_the_table() -> str:
    text = prose(PAGE)
    return text[: text.index("<!-- begin routes -->")] + text[text.index("<!-- end routes -->") :]


def test_every_route_is_described_and_no_other() -> None:
    named = set(_NAMED.findall(text_without_the_table()))
    assert named == mounted()


def test_addresses_in_shell_blocks_are_routes() -> None:
    known = [re.compile(re.sub(r"\\\{[^}]*\\\}", "[^/]+", re.escape(path))) for _, path in mounted()]
    found = [path for block in blocks("bash") for path in _PATH.findall(block.text)]
    assert found
    for path in found:
        assert any(pattern.fullmatch(path) for pattern in known), path


def test_headers_on_the_page_are_in_the_code() -> None:
    code = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "reef_cli").rglob("*.py")).lower()
    for header in set(re.findall(r"`(x-[a-z-]+[a-z])", prose(PAGE))):
        assert header in code, header


def test_error_codes_on_the_page_exist() -> None:
    from reef_cli.core import errors

    codes = {cls.code for cls in errors.leaves()}
    named = re.findall(r"(?:4\d\d|5\d\d),? `([a-z_]+)`|\(`([a-z_]+)`\)", prose(PAGE))
    found = {first or second for first, second in named}
    assert {"mode_refused", "job_out", "content_conflict", "missing_dependency"} <= found
    assert found <= codes, found - codes


def test_generic_reasons_are_in_the_code() -> None:
    line = next(part for part in prose(PAGE).split("\n\n") if part.startswith("Reasons that do not depend"))
    code = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "reef_cli").rglob("*.py"))
    for reason in re.findall(r"`([a-z_]+)`", line):
        assert f'"{reason}"' in code, reason


def test_every_row_of_the_table_says_something() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("<!-- begin routes -->")[2].partition("<!-- end routes -->")[0]
    assert len(table.strip().splitlines()) == len(mounted()) + 2
    assert not [row for row in table.splitlines() if row.rstrip().endswith("|  |")]
