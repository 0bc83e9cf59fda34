"""Write the pages and sections that are made from code and from result files, so that they cannot rot.

    python scripts/docs.py            # write them
    python scripts/docs.py --check    # exit 1 and name the stale ones

`docs/cli.md`, `docs/configuration.md` and `docs/records.md` are whole pages. In other pages a part between
`<!-- begin NAME -->` and `<!-- end NAME -->` is replaced. A test runs the check. `docs/error-codes.md` has a script of its own.
"""

import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from docs_pages import (
    canary,
    cli,
    configuration,
    demo,
    files,
    metrics,
    numbers,
    packing,
    power,
    recipes,
    records,
    routes,
    scenarios,
)

ROOT = Path(__file__).resolve().parent.parent

RECIPES = ("grpo", "sft", "opd", "sdft", "sdpo", "openclawrl")
"""Those whose pages have a table of `benchmarks/recipes_cpu.py`."""

PAGES: Mapping[str, Callable[[], str]] = {
    "docs/cli.md": cli.page,
    "docs/configuration.md": configuration.page,
    "docs/records.md": records.page,
}
SECTIONS: Mapping[tuple[str, str], Callable[[], str]] = {
    ("README.md", "numbers"): lambda: numbers.table(ROOT / "benchmarks" / "results"),
    ("docs/evaluation.md", "power"): lambda: power.table(ROOT / "benchmarks" / "results"),
    ("docs/http-api.md", "routes"): routes.table,
    ("docs/operations.md", "home"): files.table,
    ("docs/routing.md", "canary"): lambda: canary.table(ROOT / "benchmarks" / "results" / "canary.json"),
    ("docs/operations.md", "two scenarios"): lambda: scenarios.table(ROOT / "benchmarks" / "results" / "two_scenarios.json"),
    ("docs/operations.md", "metrics"): metrics.table,
    ("recipes/selfplay/README.md", "measured"): lambda: recipes.table(
        ROOT / "benchmarks/results/selfplay_cpu.json", "selfplay"
    ),
    ("recipes/openclawrl/README.md", "demo"): lambda: demo.table(ROOT / "benchmarks" / "results" / "demo.json", "openclawrl"),
    **{
        (f"recipes/{name}/README.md", "packing"): partial(packing.table, ROOT / "benchmarks/results/packing.json", name)
        for name in packing.GROUPS
    },
    **{
        (f"recipes/{name}/README.md", "measured"): partial(recipes.table, ROOT / "benchmarks/results/recipes_cpu.json", name)
        for name in RECIPES
    },
}


def current(text: str, name: str, body: str) -> str:
    """`text` with the section's body put between its marks. `ValueError` when the marks are not there once."""
    begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
    head, found, rest = text.partition(begin)
    _, closed, tail = rest.partition(end)
    if not found or not closed or begin in rest:
        raise ValueError(f"the marks of section {name} are not there once")
    return f"{head}{begin}{body.rstrip()}\n{end}{tail}"


def wanted() -> dict[Path, str]:
    """Every generated file with the text it should have."""
    texts = {ROOT / name: make() for name, make in PAGES.items()}
    for (name, section), make in SECTIONS.items():
        path = ROOT / name
        texts[path] = current(texts.get(path) or path.read_text(encoding="utf-8"), section, make())
    return texts


def main(arguments: list[str]) -> int:
    stale = [path for path, text in wanted().items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if "--check" in arguments:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is not current; run: python scripts/docs.py", file=sys.stderr)
        return 1 if stale else 0
    for path in stale:
        path.write_text(wanted()[path], encoding="utf-8")
        print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
