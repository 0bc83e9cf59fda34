"""`reef status`: what the server is doing, from `/reef/status`."""

from collections.abc import Mapping
from typing import Any

from reef_cli.commands import output
from reef_cli.commands.shell import Shell, items, new_app, release_id_of, scenario_name, with_shell

app = new_app()


@app.command()
@with_shell()
def status(shell: Shell) -> None:
    """Show scenarios, jobs, heads, engine and storage"""
    answer = shell.client.get("/reef/status")
    shell.emit(answer, lambda: draw(shell, answer))
    if not items(answer, "scenarios"):
        shell.hint('reef chat "hello" makes the first record')
    else:
        shell.hint("reef tui to watch, reef release list for the chain")


def draw(shell: Shell, answer: Mapping[str, Any]) -> None:
    """The page a person reads."""
    engine = answer.get("engine") or {}
    output.pairs(
        [
            ("server", f"{shell.client.url}, up {_duration(answer.get('uptime_s'))}, version {answer.get('version', '?')}"),
            ("home", answer.get("home")),
            ("engine", engine_line(engine)),
            ("storage", storage_line(answer.get("storage") or {})),
            ("evaluating", evaluating_line(answer.get("evaluating"))),
        ]
    )
    print()
    output.table(
        ("scenario", "state", "head", "records", "queued", "reward", "last outcome"), map(_row, items(answer, "scenarios"))
    )


def engine_line(engine: Mapping[str, Any]) -> str:
    """Kind, model, state and weight version."""
    parts = [engine.get("kind"), engine.get("model"), engine.get("state"), engine.get("weight_version")]
    adapters = engine.get("adapters") or []
    return ", ".join(str(part) for part in parts if part) + (f", {len(adapters)} LoRA adapters" if adapters else "")


def storage_line(storage: Mapping[str, Any]) -> str | None:
    """Bytes in use and free."""
    if storage.get("bytes") is None:
        return None
    free = storage.get("free_bytes")
    return output.size(storage["bytes"]) + (f", {output.size(free)} free" if free is not None else "")


def evaluating_line(under_way: Mapping[str, Any] | None) -> str | None:
    """`3 releases of default on suite.jsonl, 12/96 answers`; None when nothing is evaluated."""
    if not under_way:
        return None
    what = f"{under_way['releases']} release{'s' if under_way['releases'] != 1 else ''} of {under_way['scenario']}"
    return f"{what} on {under_way['suite']}, {under_way['done']}/{under_way['total']} answers"


def state_line(scenario: Mapping[str, Any]) -> str:
    """`training, backward 3/16`, `paused`, ..."""
    state = str(scenario.get("state") or "idle")
    phase, done, total = scenario.get("phase"), scenario.get("done"), scenario.get("total")
    progress = f" {done}/{total}" if total else ""
    named = f", {phase}" if phase and phase != state else ""
    return ("paused, " if scenario.get("paused") else "") + state + named + progress


def outcome_line(outcome: Mapping[str, Any] | None) -> str:
    """`select 4m ago: reason`."""
    if not outcome:
        return "-"
    when = output.age(outcome.get("at"))
    reason = f": {outcome['reason']}" if outcome.get("reason") else ""
    return f"{outcome.get('outcome', '?')} {when} ago{reason}"


def _row(scenario: Mapping[str, Any]) -> list[object]:
    counts = scenario.get("counts") or {}
    rewards = scenario.get("rewards") or []
    return [
        scenario_name(scenario),
        state_line(scenario),
        _heads(scenario),
        output.number(counts.get("records")),
        output.number(counts.get("queued")),
        output.number(rewards[-1] if rewards else None),
        outcome_line(scenario.get("last_outcome")),
    ]


def _heads(scenario: Mapping[str, Any]) -> str:
    """`r3-0123abcd, harness r5-89abcdef (routed)`."""
    harness = (scenario.get("heads") or {}).get("harness")
    head = (release_id_of(scenario.get("head")) or "-") + (f", harness {harness}" if harness else "")
    return head + (" (routed)" if scenario.get("routing") else "")


def _duration(seconds: object) -> str:
    return output.age(0.0, float(seconds)) if isinstance(seconds, int | float) else "?"
