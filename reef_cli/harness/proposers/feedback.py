"""Feedback that people keep giving becomes a rule, in their own words. Deterministic, needs no model.

What was said in `min_repeats` different sessions is proposed as one rule, the most frequent first; a request in words at once.
What the harness says already is not proposed again, nor what was tried `max_tries` times and not released.
"""

import hashlib
import re
from collections import defaultdict

from reef_cli.harness.merge import Mutation, Op
from reef_cli.harness.proposing import Ask, Evidence, Past, Proposed, Window
from reef_cli.harness.tree import Entry

LONGEST = 500
"""Characters of a rule; longer feedback is no rule but a story."""


def plain(text: str) -> str:
    """Text without what does not change its meaning: case, white space, punctuation at the ends."""
    return re.sub(r"\s+", " ", text).strip(" \t\n.!,;:\"'").casefold()


class RepeatedFeedback:
    """See the module."""

    def __init__(self, min_repeats: int = 3, max_tries: int = 2) -> None:
        if min_repeats < 1 or max_tries < 1:
            raise ValueError("min_repeats and max_tries are at least 1")
        self._min_repeats = min_repeats
        self._max_tries = max_tries

    async def propose(self, window: Window, ask: Ask) -> Proposed:  # noqa: ARG002 - it asks nobody
        said = self._said(window.evidence)
        known = {plain(entry.text) for entry in window.tree if entry.kind in ("rules", "system")}
        tried = _tried(window.history)
        for text, (count, words) in sorted(said.items(), key=lambda item: (-item[1][0], item[0])):
            if count >= self._min_repeats and text not in known and tried.get(text, 0) < self._max_tries:
                return _rule(text, words, window, f"said {count} times: {words}")
        return Proposed(reason=f"no feedback was given {self._min_repeats} times that is neither in force nor tried before")

    def _said(self, evidence: tuple[Evidence, ...]) -> dict[str, tuple[int, str]]:
        """Per plain text how often (sessions count once) and its first wording. A request counts as often as it must."""
        sessions: dict[str, set[str]] = defaultdict(set)
        words: dict[str, str] = {}
        requested = set()
        for item in evidence:
            text = plain(item.feedback)
            if not text or len(item.feedback) > LONGEST:
                continue
            sessions[text].add(item.session or item.id)
            words.setdefault(text, re.sub(r"\s+", " ", item.feedback).strip())
            if item.kind == "request":
                requested.add(text)
        least = self._min_repeats
        return {
            text: (max(len(found), least) if text in requested else len(found), words[text]) for text, found in sessions.items()
        }


def _rule(text: str, words: str, window: Window, reason: str) -> Proposed:
    name = f"feedback-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    op: Op = "update" if window.tree.get(name) is not None else "create"
    return Proposed((Mutation(op, name, Entry(name, "rules", {"text": words})),), reason)


def _tried(history: tuple[Past, ...]) -> dict[str, int]:
    """How often each rule was proposed and not released."""
    found: dict[str, int] = defaultdict(int)
    for past in history:
        if past.outcome in ("select", "failed"):
            continue
        for mutation in past.mutations:
            config = (mutation.get("entry") or {}).get("config") or {}
            found[plain(str(config.get("text", "")))] += 1
    return found
