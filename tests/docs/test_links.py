"""Links and named files on the pages lead somewhere."""

import re
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT, prose

_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_FILE = re.compile(r"`((?:reef_cli|recipes|scripts|tests|benchmarks|docs|templates|adapters)/[\w./-]+)`")


def anchors(page: Path) -> set[str]:
    """Anchors of headings, as hosts make them."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in _LINK.findall(prose(page)):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        aim = (page.parent / name).resolve() if name else page
        assert aim.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(aim), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_exist(page: Path) -> None:
    example = ("recipes/liked", "recipes/mine")
    for name in _FILE.findall(prose(page)):
        assert name.startswith(example) or (ROOT / name).exists(), f"{page.name} names {name}"


def test_every_page_is_in_the_index() -> None:
    index = prose(ROOT / "docs" / "index.md")
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "index.md" or f"]({page.name})" in index, page.name
