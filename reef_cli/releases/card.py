"""The model card of a release: `README.md` with YAML front matter, made from the evidence's own numbers.

The front matter follows the Hugging Face conventions (base_model, library_name, tags, model-index), so that the folder of a
weights release can be pushed there as it is. Nothing is claimed that the evidence does not hold.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

from reef_cli.core.types import Release, Surface

_LIBRARY = {"lora": "peft", "checkpoint": "transformers"}
_METRICS = {
    "candidate_mean": "mean score",
    "current_mean": "mean score of the release before",
    "difference": "paired difference",
}


def model_card(release: Release, about: Mapping[str, Any]) -> bytes:
    """The card's bytes."""
    import yaml

    title = f"{release.scenario} {release.release_id}"
    parts = [f"# {title}", _summary(release), _table(release)]
    body = "\n\n".join(part for part in parts if part) + "\n"
    if release.surface is not Surface.WEIGHTS or release.kind == "base":
        return body.encode()
    front = yaml.safe_dump(_front(release, about, title), sort_keys=False, allow_unicode=True)
    return f"---\n{front}---\n\n{body}".encode()


def _front(release: Release, about: Mapping[str, Any], title: str) -> dict[str, Any]:
    base = release.evidence.get("base_model") or about.get("base_model_name_or_path")
    front: dict[str, Any] = {"library_name": _LIBRARY.get(release.kind, "transformers")}
    if isinstance(base, str) and base:
        # A folder of this machine means nothing elsewhere; its name does.
        front["base_model"] = PurePath(base).name if base.startswith((".", "/", "~")) else base
    front["tags"] = ["reef", release.kind, f"scenario:{release.scenario}"]
    gate = _gate(release.evidence)
    metrics = [{"type": key, "value": gate[key], "name": name} for key, name in _METRICS.items() if _finite(gate.get(key))]
    if metrics:
        suite = gate.get("suite")
        name = suite.get("name", "suite") if isinstance(suite, Mapping) else "suite"
        result = {"task": {"type": "text-generation"}, "dataset": {"type": "reef-suite", "name": name}, "metrics": metrics}
        front["metrics"] = [metric["type"] for metric in metrics]
        front["model-index"] = [{"name": title, "results": [result]}]
    return front


def _gate(evidence: Mapping[str, Any]) -> Mapping[str, Any]:
    """The gate's numbers: the evidence itself or a part of it, wherever `candidate_mean` stands."""
    parts = [evidence, *(part for part in evidence.values() if isinstance(part, Mapping))]
    return next((part for part in parts if "candidate_mean" in part), {})


def _summary(release: Release) -> str:
    lines = [
        f"- operation: {release.operation}, step {release.step}, by {release.author}",
        f"- parent: {release.parent_release_id or 'none'}",
        f"- content: `{release.content_id}` ({release.kind})",
        f"- evaluated in full: {'yes' if release.gated else 'no'}",
    ]
    if release.source_release_id:
        lines.append(f"- content of: {release.source_release_id}")
    if isinstance(reason := release.evidence.get("reason"), str):
        lines.append(f"- reason: {' '.join(reason.split())[:500]}")
    return "\n".join(lines)


def _table(release: Release) -> str:
    rows = [f"| {key} | {value:.6g} |" for key, value in _numbers(release.evidence)]
    return "\n".join(["| evidence | value |", "|---|---|", *rows]) if rows else ""


def _numbers(evidence: Mapping[str, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, float]]:
    for key, value in evidence.items():
        name = f"{prefix}{key}".replace("|", "/").replace("\n", " ")
        if _finite(value):
            yield name, value
        elif isinstance(value, Mapping) and depth < 2:
            yield from _numbers(value, f"{name}.", depth + 1)


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
