"""The agent's harness as files: settings, system prompt, rules, skills and commands of one folder."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

DEFAULT_SYSTEM = (
    "You are a careful coding agent. Work in the current directory with the tools you have, check what you did, "
    "and end with a short answer."
)
DEFAULTS: dict[str, Any] = {
    "max_turns": 50,
    "tools": ["read", "bash", "edit", "write"],
    "rules_place": "system",
    "sampling": {},
}
_NAME = re.compile(r"^(name|description):\s*(.*)$", re.MULTILINE)


class Harness:
    """Everything the folder says. `rules_place` user puts the rules behind the user's words, where small models heed them."""

    def __init__(self, folder: Path, project: Path) -> None:
        self.folder = folder
        self.settings = {**DEFAULTS, **self._settings()}
        self.rules = "\n".join(text for text in (self._text("AGENTS.md"), _read(project / "AGENTS.md")) if text).strip()

    def system(self) -> str:
        """The system message; empty when the settings want none."""
        parts = [self._text("SYSTEM.md") or DEFAULT_SYSTEM, self._text("APPEND_SYSTEM.md")]
        if self.settings["rules_place"] == "system":
            parts.append(self.rules)
        skills = [self._skill(path) for path in sorted(self.folder.glob("skills/*/SKILL.md"))]
        listed = [line for line in skills if line]
        if listed:
            parts.append("Skills (read the file before you use one):\n" + "\n".join(listed))
        return "\n\n".join(part.strip() for part in parts if part.strip())

    def user(self, prompt: str) -> str:
        """The user's message: commands expanded, rules behind it when they belong there."""
        text = self._command(prompt)
        return f"{text}\n\n{self.rules}" if self.rules and self.settings["rules_place"] == "user" else text

    def _command(self, prompt: str) -> str:
        name, _, rest = prompt.partition(" ")
        path = self.folder / "commands" / f"{name[1:]}.md"
        if not re.fullmatch(r"/[a-z0-9-]+", name) or not path.is_file():
            return prompt
        words = rest.split()
        body = _body(_read(path)).replace("$ARGUMENTS", rest)
        return re.sub(r"\$([1-9])", lambda match: words[int(match[1]) - 1] if int(match[1]) <= len(words) else "", body)

    def _skill(self, path: Path) -> str:
        text = _read(path)
        if "\ndisable-model-invocation: true\n" in text.partition("\n---")[0] + "\n":
            return ""
        fields = {key: _plain(value) for key, value in _NAME.findall(text.partition("\n---")[0])}
        return f"- {fields.get('name', path.parent.name)}: {fields.get('description', '')} ({path})"

    def _settings(self) -> dict[str, Any]:
        try:
            found = json.loads(self._text("settings.json") or "{}")
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def _text(self, name: str) -> str:
        return _read(self.folder / name)


def _plain(value: str) -> str:
    try:
        return str(json.loads(value))
    except ValueError:
        return value.strip("\"'")


def _body(text: str) -> str:
    if text.startswith("---\n"):
        return text.partition("\n---\n")[2].lstrip("\n")
    return text


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
