"""A run's results as files: the best solution with its verification, the curve, one page. Written whole or not at all."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reef_cli.core.errors import ReefError
from reef_cli.discovery import pictures
from reef_cli.discovery.archive import Archive
from reef_cli.discovery.problem import Problem
from reef_cli.discovery.verify import verify


def summary(problem: Problem, archive: Archive) -> dict[str, Any]:
    """The best solution, verified again now, where it came from, and the course of the run. `ReefError` without a solution."""
    best = archive.best()
    if best is None:
        raise ReefError("the run has no solution yet", hint="run a step first")
    verdict = verify(problem.verifier, best.solution)
    history = archive.history()
    return {
        "problem": problem.name,
        "statement": problem.statement,
        "value": verdict.value,
        "strict": verdict.strict,
        "valid": verdict.valid,
        "verification": {"reason": verdict.reason, **verdict.details},
        "solution": best.solution,
        "text": best.text,
        "origin": archive.origin(best.id),
        "steps": len(history),
        "tries": sum(row["rollouts"] for row in history),
        "valid_tries": sum(row["valid"] for row in history),
        "history": history,
    }


def write(found: Mapping[str, Any], problem: Problem, folder: Path) -> dict[str, Path]:
    """`best.json`, `curve.svg` and `report.html` in `folder`; returns their paths by name."""
    folder.mkdir(parents=True, exist_ok=True)
    title = f"{problem.name}: {found['strict']:.12g}"
    facts = {name: found[name] for name in ("strict", "value", "valid", "steps", "tries", "valid_tries", "text")}
    files = {
        "best.json": json.dumps(found, indent=1) + "\n",
        "curve.svg": pictures.curve(found["history"], title),
        "report.html": pictures.page(title, facts, found["history"], problem.draw(found["solution"])),
    }
    return {name: _write(folder / name, text) for name, text in files.items()}


def _write(path: Path, text: str) -> Path:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
    return path
