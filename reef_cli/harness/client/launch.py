"""Filling a launch: from the adapter's templates to arguments and environment. Shared by the wrapper and by episodes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

PROXIES = ("NO_PROXY", "no_proxy")


def fill(template: str, values: Mapping[str, str]) -> str:
    """`{name}` replaced for known names only; any other brace stays as it is."""
    for name, value in values.items():
        template = template.replace("{" + name + "}", value)
    return template


def values(config: str, program: str, base_url: str, token: str, model: str, scenario: str, notice: str = "") -> dict[str, str]:
    """What templates may name. The prompt is not among them: it is put in last and never searched for placeholders."""
    return {
        "config": config,
        "program": program,
        "base_url": base_url,
        "token": token,
        "model": model,
        "scenario": scenario,
        "notice_json": json.dumps({"systemMessage": notice}) if notice else "",
        "notice": notice,
    }


def arguments(launch: Mapping[str, Any], mode: str, known: Mapping[str, str], prompt: str | None = None) -> list[str]:
    """The argument vector of a start; `args` of the rendered tree go right behind the program."""
    argv = [prompt if item == "{prompt}" and prompt is not None else fill(item, known) for item in launch[mode]]
    extra = [fill(item, {"config": known["config"]}) for item in launch.get("args", ())]
    head = list(launch.get("runner", ())) + argv[:1]
    return head + extra + argv[1:]


def environment(launch: Mapping[str, Any], known: Mapping[str, str], base: Mapping[str, str]) -> dict[str, str]:
    """`base` with the agent's own variables laid over it, and loopback kept away from any HTTP proxy the shell has set."""
    out = dict(base)
    out.update(launch.get("tree_env", {}))
    out.update({name: fill(value, known) for name, value in launch.get("env", {}).items()})
    out[launch["config_env"]] = known["config"]
    for name in PROXIES:
        present = [item for item in base.get(name, "").split(",") if item]
        out[name] = ",".join(dict.fromkeys([*present, "127.0.0.1", "localhost"]))
    return out
