"""The deployment templates fit the program: they call commands that exist, copy what is there and set keys that load."""

import configparser
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from reef_cli.config.load import load

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "templates" / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")


def reef_variables(text: str) -> dict[str, str]:
    """Assignments of Reef's own variables in a Dockerfile or a unit."""
    return dict(re.findall(r"\b(REEF_[A-Z_]+)=([^\s\"]+)", text))


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(DEPLOY / "reef.service", encoding="utf-8")
    return parser


@pytest.mark.parametrize("name", ["Dockerfile", "reef.service"])
def test_variables_are_ones_the_program_reads(name: str) -> None:
    variables = reef_variables((DEPLOY / name).read_text(encoding="utf-8"))
    assert "REEF_HOME" in variables
    settings = {key: value for key, value in variables.items() if "__" in key}
    loaded = load([], settings, None)
    assert all(any(origin == f"env {key}" or key in origin for origin in loaded.origins.values()) for key in settings)


def test_the_image_installs_extras_that_exist_and_the_tested_sglang() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (extras,) = re.findall(r"/src\[([\w,-]+)\]", DOCKERFILE)
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    (version,) = re.findall(r"SGLANG_VERSION=([\d.]+)", DOCKERFILE)
    assert f"sglang=={version}\n" in (ROOT / "tests/sglang/cpu/constraints.txt").read_text(encoding="utf-8")


def test_the_image_serves_the_file_that_compose_mounts() -> None:
    service: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))["services"]["reef"]
    inside = service["volumes"][0].split(":")[1]
    assert f'"serve", "-c", "{inside}"' in DOCKERFILE
    assert service["build"]["dockerfile"] == (DEPLOY / "Dockerfile").relative_to(ROOT).as_posix()
    assert (DEPLOY / service["build"]["context"]).resolve() == ROOT
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])


def test_the_unit_starts_the_server_and_lets_it_end_its_own_processes() -> None:
    service = unit()["Service"]
    words = service["ExecStart"].split()
    assert words[1:3] == ["serve", "-c"]
    assert service["KillMode"] == "mixed"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_knows_every_key_of_the_unit() -> None:
    done = subprocess.run(
        ["systemd-analyze", "verify", str(DEPLOY / "reef.service")], capture_output=True, text=True, timeout=60, check=False
    )
    complaints = [line for line in done.stderr.splitlines() if "is not executable" not in line]
    assert not [line for line in complaints if "Unknown" in line or "Failed to parse" in line], complaints
