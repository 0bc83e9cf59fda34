"""The direction of imports between rooms, and which heavy libraries each room may touch (docs/design.md section 2)."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "reef_cli"

ALLOWED: dict[str, set[str]] = {
    "core": set(),
    "config": {"core", "learning"},
    "experience": {"core"},
    "releases": {"core"},
    "sandbox": {"core"},
    "telemetry": {"core"},
    "weights": {"core"},
    "engines": {"core", "weights", "config"},
    "trainer": {"core", "weights", "config"},
    "learning": {"core", "config", "experience", "releases"},
    "evaluation": {"core", "config", "sandbox"},
    "harness": {"core", "config", "sandbox"},
    "discovery": {"core", "sandbox"},
    "gateway": {"core", "config", "experience", "releases", "telemetry"},
    "control": {"core", "config"},
    "supervisor": {
        "core",
        "config",
        "experience",
        "releases",
        "telemetry",
        "weights",
        "engines",
        "trainer",
        "learning",
        "evaluation",
        "harness",
        "gateway",
        "control",
    },
    "tui": {"core", "control", "config"},
    "demo": {"core", "control", "config", "evaluation"},
    "commands": {
        "core",
        "control",
        "config",
        "supervisor",
        "tui",
        "releases",
        "engines",
        "learning",
        "experience",
        "harness",
        "discovery",
        "demo",
    },
}
"""Room -> rooms it may import. `config` knows the recipe contract to check recipe settings; `commands` reach releases,
engines and harness only for work on this machine (release commands with the server down, `reef model`, installing agents)."""

TORCH_ROOMS = {"weights", "trainer", "engines"}
DEEPSPEED_ROOMS = {"trainer"}


def room(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module)
    return names


SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    own = room(path)
    assert own in ALLOWED, f"{own} is not a room of the house"
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "reef_cli" and len(parts) > 1 and parts[1] != own:
            assert parts[1] in ALLOWED[own], f"{path.name} in {own} imports {name}"
        if parts[0] in ("torch", "transformers", "peft", "safetensors"):
            assert own in TORCH_ROOMS, f"{own} imports {name}"
        if parts[0] == "deepspeed":
            assert own in DEEPSPEED_ROOMS, f"{own} imports {name}"
        assert not name.startswith("recipes."), f"{own} names a particular recipe"


def test_core_uses_the_standard_library_only() -> None:
    import sys

    for path in (PACKAGE / "core").glob("*.py"):
        for name in imports(path):
            top = name.split(".")[0]
            assert top in sys.stdlib_module_names or top == "reef_cli", f"{path.name} imports {name}"
