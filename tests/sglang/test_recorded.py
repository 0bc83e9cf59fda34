"""The installed SGLang's types are those the contract tests of the normal suite were recorded from."""

import json
import os
import subprocess
from pathlib import Path

from reef_cli.engines import sglang_args
from tests.sglang.running import python

RECORDED = Path(__file__).resolve().parent.parent / "engines" / "contract" / "sglang.json"
CPU = {"SGLANG_USE_CPU_ENGINE": "1"}


def test_the_packages_own_types_are_the_recorded_ones() -> None:
    recorder = str(Path(__file__).with_name("recorder.py"))
    done = subprocess.run(
        [python(), "-W", "ignore", recorder], capture_output=True, text=True, env=os.environ | CPU, timeout=280, check=True
    )
    found, recorded = json.loads(done.stdout), json.loads(RECORDED.read_text())
    assert found["version"] == recorded["version"]
    assert found == recorded, "record anew with tests/sglang/recorder.py, then see what the contract tests say"


def test_the_installed_arguments_are_asked_once_and_kept(tmp_path: Path) -> None:
    installed = sglang_args.inspect(python(), tmp_path, CPU)
    recorded = json.loads(RECORDED.read_text())
    assert installed.version == recorded["version"]
    assert {f"--{name}" for name in installed.options} == {name for name in recorded["flags"] if not name.startswith("--no-")}
    assert installed.options["device"]["kind"] == "value" and installed.options["lora-strict-loading"]["kind"] == "pair"
    (kept,) = tmp_path.iterdir()
    kept.write_text(json.dumps({"kept": {"kind": "switch", "choices": []}}))
    assert list(sglang_args.inspect(python(), tmp_path, CPU).options) == ["kept"]
