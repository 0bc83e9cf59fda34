"""Failing prompts that became tasks: screened, without repeats, no more than a cap; one file per scenario, written whole."""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from reef_cli.harness import credentials
from reef_cli.harness.proposing import Evidence

LONGEST = 2000
SHORTEST = 8


@dataclass(frozen=True, slots=True)
class Promoted:
    """A prompt that is a task now; `source` is the report that brought it."""

    id: str
    prompt: str
    source: str


class Promotions:
    """The promoted prompts of all scenarios below one folder; at most `cap` each, first come."""

    def __init__(self, folder: Path, cap: int) -> None:
        self._folder = folder
        self._cap = cap

    def tasks(self, scenario: str) -> list[Promoted]:
        """What was promoted so far."""
        path = self._folder / f"{scenario}.json"
        if not path.is_file():
            return []
        return [Promoted(**row) for row in json.loads(path.read_text(encoding="utf-8"))]

    def add(self, scenario: str, evidence: Iterable[Evidence], taken: Iterable[str] = ()) -> int:
        """Promote what passes the screen and is not there yet (nor among the prompts `taken`); how many were new."""
        have = self.tasks(scenario)
        known = {_plain(item.prompt) for item in have} | {_plain(prompt) for prompt in taken}
        found: list[Promoted] = []
        for item in evidence:
            if len(have) + len(found) >= self._cap:
                break
            if screen(item) is None and _plain(item.prompt) not in known:
                known.add(_plain(item.prompt))
                mark = hashlib.sha256(_plain(item.prompt).encode()).hexdigest()[:12]
                found.append(Promoted(f"promoted-{mark}", item.prompt, item.id))
        if found:
            self._write(scenario, have + found)
        return len(found)

    def _write(self, scenario: str, items: list[Promoted]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, draft = tempfile.mkstemp(dir=self._folder, prefix=f".{scenario}-")
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            json.dump([{"id": item.id, "prompt": item.prompt, "source": item.source} for item in items], out, indent=1)
            out.flush()
            os.fsync(out.fileno())
        Path(draft).replace(self._folder / f"{scenario}.json")


def screen(item: Evidence) -> str | None:
    """Why a prompt cannot be a task, or None. A task has to say everything itself and may hold no secret."""
    if item.kind != "failure":
        return "it is no run"
    if sum(message.get("role") == "user" for message in item.messages) > 1:
        return "it is part of a longer conversation"
    if not SHORTEST <= len(item.prompt.strip()) <= LONGEST:
        return "it is too short or too long"
    if next(credentials.findings(item.prompt), None) is not None:
        return "it holds something that looks like a credential"
    return None


def _plain(prompt: str) -> str:
    return " ".join(prompt.split()).casefold()
