"""The table of measured numbers in the README. Every figure comes from a file in `benchmarks/results`; none is written here.

A result file this module does not know is an error; one that is missing leaves no row.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from docs_pages.markdown import table as markdown

Row = tuple[str, str]


def table(folder: Path) -> str:
    """Rows of what was measured, the figure, the machine, the commit, the file."""
    rows = []
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        facts = _where(result) if isinstance(result, Mapping) else ("", "")
        found = list(KNOWN[path.stem](result))
        rows += [(what, figure, *facts, f"[{path.name}](benchmarks/results/{path.name})") for what, figure in found]
    return markdown(("what", "measured", "machine", "commit", "file"), rows)


def _where(result: Mapping[str, Any]) -> tuple[str, str]:
    """Cores and load, and the commits; of every run where a file keeps runs of several days."""
    runs = [run for run in _runs(result) if isinstance(run.get("machine"), Mapping)] or [result]
    facts = [_facts(run) for run in runs]
    cores = sorted({str(cores) for cores, _, _ in facts if cores})
    loads = [load for _, load, _ in facts if load is not None]
    commits = dict.fromkeys(commit for _, _, commit in facts if commit)
    shown = [f"{min(loads):.1f}", *([f"{max(loads):.1f}"] if max(loads) - min(loads) >= 0.1 else [])] if loads else []
    parts = [f"{' or '.join(cores)} cores" if cores else "", f"load {' to '.join(shown)}" if shown else ""]
    return ", ".join(part for part in parts if part), ", ".join(commits)


def _runs(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    found = result.get("cells") or result.get("arms") or result.get("runs")
    runs = list(found.values()) if isinstance(found, Mapping) else found if isinstance(found, list) else []
    return [run for run in runs if isinstance(run, Mapping)]


def _facts(result: Mapping[str, Any]) -> tuple[Any, float | None, str]:
    machine = result.get("machine")
    nested = machine if isinstance(machine, Mapping) else {}
    cores = nested.get("cores") or nested.get("cpus") or result.get("cpus")
    load = result.get("load", result.get("load_before", nested.get("load", nested.get("load_average"))))
    load = load[0] if isinstance(load, list) else str(load).split()[0] if load is not None else None
    commit = str(result.get("commit") or nested.get("commit") or "")
    return cores, None if load is None else float(load), commit[:7]


def _gateway(result: Any) -> Iterator[Row]:
    for name in ("1 KB, 16 connections", "stream of 200 chunks, 16 connections"):
        case = result["cases"].get(name)
        if case:
            others = {"plain aiohttp proxy that records nothing": "plain", "reef-infra 0.0.2": "reef_infra"}
            beside = [f"{words}: {case[arm]['cpu_us_per_request']:.0f} µs" for words, arm in others.items() if arm in case]
            figure = f"{case['reef']['cpu_us_per_request']:.0f} µs ({', '.join(beside)})"
            yield f"gateway CPU per recorded upstream request, {name}", figure
    busy = result["cases"].get("1 KB, 16 connections", {})
    if "reef_power" in busy and "reef_infra" in busy:
        rates = {arm: f"{busy[arm]['requests_per_s']:.0f}" for arm in ("reef", "reef_power", "reef_infra")}
        yield (
            "recorded requests a second on one core, 1 KB, 16 connections",
            f"{rates['reef']}; synced before each answer {rates['reef_power']} (reef-infra 0.0.2: {rates['reef_infra']})",
        )
    if "memory" in result:
        memory, ready = result["memory"]["reef"], result["starts"]["reef_alone"]["ready_s"]
        yield "`reef serve` with an upstream engine: start to ready", f"{ready:.2f} s"
        yield "its memory at the start, and after the load", f"{memory['at_start_mb']:.0f} MB, {memory['after_load_mb']:.0f} MB"


def _soak(result: Any) -> Iterator[Row]:
    memory, files = result["memory_flat"], result["descriptors_flat"]
    yield (
        f"soak: {result['minutes']:g} minutes at half load, {result['half_requests_per_s']:.0f} requests a second",
        f"memory after warm-up {memory['grew_mb']:+.1f} MB, descriptors {files['grew']:+.0f}",
    )


def _fuzz(result: Any) -> Iterator[Row]:
    yield f"odd requests to every route and dialect: {result['requests']}", f"own 5xx answers: {result['own_5xx']}"


def _experience(result: Any) -> Iterator[Row]:
    for row in result["inserts"]:
        if row["concurrent"] == 16:
            yield (
                f"durable record appends, 16 writers, durability `{row['durability']}`",
                f"{row['rows_per_s']}/s, p50 {row['p50_ms']:.1f} ms",
            )
    longest = max(result["sessions"], key=lambda row: row["turns"])
    yield (
        f"storage of a {longest['turns']}-turn session",
        f"{longest['stored_bytes_per_turn']} bytes of bodies per turn instead of {longest['naive_bytes_per_turn']}",
    )


def _release(result: Any) -> Iterator[Row]:
    for name in ("publish", "rollback"):
        yield f"release store: {name} (commit, fsync, head moved)", f"median {result[name]['median_ms']:.0f} ms"
    listing, made = result["listing"], result.get("checkpoints")
    yield f"list a chain of {listing['releases']} from a fresh process", f"{listing['fresh_packed']['wall_ms']:.0f} ms"
    if made:
        size, older = f"{made['checkpoint_mb']:.0f} MB", f"{made['mb_per_older_checkpoint']} MB per older one"
        what = f"disk for {made['checkpoints']} full checkpoints of {size}, steps of {made['learning_rate']:g}"
        yield what, f"{made['compacted_mb']:.0f} MB instead of {made['whole_mb']:.0f}; {older}"

    if learned := result.get("learned"):
        kept = f"{learned['compacted_mb']:.0f} MB instead of {learned['whole_mb']:.0f}"
        yield f"disk for {learned['releases']} full checkpoints of real SAO steps", kept


def _gate(result: Any) -> Iterator[Row]:
    yield (
        f"gate at alpha 0.05, simulated, {result['runs']} runs a cell: worst rate of publishing a candidate that is no better",
        f"{100 * result['false_publish_max']:.1f} %",
    )
    for row in result["rows"]:
        if (row["effect_points"], row["discordant"], row["items"]) == (10, 0.2, 300):
            yield "gate: 10 points better, 300 items, 20 % of pairs differ: published", f"{100 * row['better']:.0f} %"


def _push(result: Any) -> Iterator[Row]:
    for row in result["rows"]:
        what = {
            "adapter": "a LoRA adapter",
            "adapter_load": "a LoRA adapter read from disk",
            "merged": "an adapter merged",
            "full": "all weights",
        }[row["mode"]]
        size = row["file_bytes"] / 1e6
        pause = f"wait between chunks p99 {row['chunk_gap_s']['p99']:.2f} s, at most {row['chunk_gap_s']['max']:.2f} s"
        held = f", engine paused {row['paused_s']['p50']:.2f} s" if row.get("paused_s") else ""
        yield (
            f"{row['swaps']} swaps of {what} ({size:.0f} MB) under 8 streaming clients",
            f"swap p50 {row['swap_s']['p50']:.2f} s{held}; {pause}; errors {row['errors']}, wrong labels {row['mislabelled']}",
        )


def _step(result: Any) -> Iterator[Row]:
    padded, packed = result["rows"]["padded"], result["rows"]["packed"]
    yield (
        f"a LoRA step over {result['samples']} samples of mixed lengths, padded and packed",
        f"{padded['tokens_per_s']:.0f} and {packed['tokens_per_s']:.0f} tokens/s",
    )


def _gpu(result: Any) -> Iterator[Row]:
    on = result.get("gpu", "the CPU, in place of a GPU")
    steps = {method: row for method, row in result["steps"].items() if method != "failed"}
    for method, row in steps.items():
        words = {"lora": "a LoRA step", "full": "a step of all weights"}[method]
        yield f"{words} on {on}", f"{row['tokens_per_s']:.0f} tokens/s"
    for transport, row in result["pushes"].items():
        if transport != "failed":
            seconds = sum(value for name, value in row.items() if name.endswith("_seconds"))
            yield f"all weights ({row['bytes'] / 1e6:.0f} MB) pushed from {on}: {transport}", f"{seconds:.2f} s"
    if "failed" not in result["handles"]:
        yield (
            f"the same handed to another process on {on}",
            f"written {result['handles']['write_s']:.3f} s, read {result['handles']['read_s']:.3f} s",
        )


def _canary(result: Any) -> Iterator[Row]:
    worst = max(result["false_max"].values())
    yield (
        f"canary at alpha 0.05, simulated, {result['runs']} runs a cell: worst rate of moving a release that is equal",
        f"{100 * worst:.1f} %",
    )


def _sao(result: Any) -> Iterator[Row]:
    arms = result["table"]
    low, high = arms["sao"]["sampled_interval"]
    others = f"no critic and no mask {arms['plain']['sampled_mean']:.2f}, frozen {arms['frozen']['sampled_mean']:.2f}"
    yield (
        f"SAO, {result['steps']} steps of 16 answers, 3 seeds: held-out score at temperature 1",
        f"{arms['sao']['sampled_mean']:.2f}, 95 % interval {low:.2f} to {high:.2f} ({others})",
    )


def _two_scenarios(result: Any) -> Iterator[Row]:
    rows, count, steps = result["table"], len(result["runs"]), result["runs"][0]["steps"]
    seeds = f"{count} seed{'s' if count > 1 else ''}"
    for who in ("brief", "talkative"):
        own, before = rows[f"{who}, {who}, sampled"], rows[f"untouched, {who}, sampled"]
        yield (
            f"two scenarios on one base, {steps} steps each, {seeds}: what `{who}`'s users want, before and after",
            f"{before['mean']:.2f}, {own['mean']:.2f} (seeds: {', '.join(f'{value:.2f}' for value in own['seeds'])})",
        )
    same = "chains equal to those alone, bit for bit"
    yield (
        "the same: chains of weights equal to those learned alone, bit for bit; answers of an untouched scenario unchanged",
        f"{rows[same]}; {rows['untouched answers as before']}",
    )


def _recipes(result: Any) -> Iterator[Row]:
    for name, rows in result["table"].items():
        own, control, frozen = rows["recipe"], rows["control"], rows["frozen"]
        if own["seeds"] > 1:
            low, high = own["sampled_interval"]
            others = f"{control['arm']} {control['sampled']:.2f}, " if control["seeds"] > 1 else ""
            yield (
                f"{name}, {result['steps']} steps of {result['batch']} answers, {own['seeds']} seeds: held-out at T = 1",
                f"{own['sampled']:.2f}, 95 % interval {low:.2f} to {high:.2f} ({others}frozen {frozen['sampled']:.2f})",
            )


def _demo(result: Any) -> Iterator[Row]:
    for recipe in sorted({run["recipe"] for run in result["runs"]}):
        runs = [run for run in result["runs"] if run["recipe"] == recipe]
        after = ", ".join(f"{run['after']:.2f}" for run in runs)
        yield (
            f"`reef demo --recipe {recipe}`, {len(runs)} runs, {runs[0]['steps']} steps: held-out before and after",
            f"{runs[0]['before']:.2f}, {after}; {max(run['seconds'] for run in runs) / 60:.0f} minutes at most",
        )


def _packing(result: Any) -> Iterator[Row]:
    for row in result["table"]:
        arms = sorted(row["arms"].items(), key=lambda item: -item[1]["mean"])
        shown = ", ".join(f"{name} {arm['mean']:.6f} ({len(arm['best'])})" for name, arm in arms)
        what = f"packing {row['n']} circles, {row['tries']} verified tries an arm, space `{row['space']}`"
        yield f"{what}: mean best strict sum (seeds)", shown


def _selfplay(result: Any) -> Iterator[Row]:
    yield from _recipes({**result, "batch": f"about {result['batch']}"})


def _harness_evolve(result: Any) -> Iterator[Row]:
    runs = result["runs"]
    each = ", ".join(f"{run['after']:.2f}" for run in runs)
    rejected = sum(run["bad"]["outcome"] == "reject" for run in runs)
    yield (
        f"harness evolution, {len(runs)} seeds: {result['items']} held-out tasks before and after the released rule",
        f"{result['mean']['before']:.2f}, {each}; the harmful rule rejected {rejected} times of {len(runs)}",
    )


def _engine(result: Any) -> Iterator[Row]:
    rows = {(row["engine"], row["requests"]): row for row in result["rows"]}
    ours, theirs = rows["embedded", 16], rows["transformers", 16]
    yield (
        "embedded engine, 135M model, 16 requests",
        f"{ours['tokens_per_s']:.0f} tokens/s, {ours['cpu_s_per_1000_tokens']:.1f} CPU s per 1000 tokens"
        f" (transformers' continuous batching: {theirs['tokens_per_s']:.0f}, {theirs['cpu_s_per_1000_tokens']:.1f})",
    )


KNOWN: Mapping[str, Callable[[Any], Iterator[Row]]] = {
    "gateway": _gateway,
    "soak": _soak,
    "fuzz": _fuzz,
    "sao_cpu": _sao,
    "recipes_cpu": _recipes,
    "packing": _packing,
    "selfplay_cpu": _selfplay,
    "demo": _demo,
    "engine_cpu": _engine,
    "experience": _experience,
    "release": _release,
    "gate": _gate,
    "push": _push,
    "step": _step,
    "gpu": _gpu,
    "canary": _canary,
    "two_scenarios": _two_scenarios,
    "harness_evolve": _harness_evolve,
}
