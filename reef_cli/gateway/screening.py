"""The rules an instruction in words must pass before it is stored. Pure; names the rule that was broken, never the text.

An instruction steers what the system becomes, so text that carries a credential or tries to override earlier instructions is
refused. The rules see through spacing, case, compatibility characters and zero-width marks; they are a fence against
accidents and the obvious, not a proof.
"""

import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from reef_cli.core.errors import InstructionRefused, InvalidRequest
from reef_cli.gateway.bodies import kind_of
from reef_cli.telemetry.secrets import credential_shaped

LONGEST_TEXT = 4000
MOST_REQUIRES = 8
_LONGEST_ITEM = 500
_UNSEEN = re.compile(r"[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2064\u2066-\u2069\ufeff\ufe00-\ufe0f]")
_OVERRIDE = tuple(
    re.compile(pattern, re.IGNORECASE | re.DOTALL)
    for pattern in (
        r"\b(ignore|disregard|forget|override|overrule|bypass|skip|drop)\b.{0,40}"
        r"\b(previous|prior|above|earlier|preceding|existing|all|any|your|system)\b.{0,40}"
        r"\b(instructions?|prompts?|rules?|directions?|directives?|guidelines?|messages?|polic(?:y|ies))\b",
        r"\b(you are|act as|pretend to be)\b.{0,40}\b(no longer bound|unrestricted|jailbroken|without (any )?restrictions?)\b",
        r"\b(reveal|print|show|output|repeat)\b.{0,30}\b(system prompt|hidden instructions?)\b",
    )
)


def screen(text: str) -> None:
    """`InvalidRequest` for the wrong length, `InstructionRefused` naming the rule that was broken."""
    if not text.strip():
        raise InvalidRequest("text is empty", hint=f"write 1 to {LONGEST_TEXT} characters", param="text")
    if len(text) > LONGEST_TEXT:
        raise InvalidRequest(f"text is longer than {LONGEST_TEXT} characters", param="text")
    plain = _UNSEEN.sub("", unicodedata.normalize("NFKC", text))
    if credential_shaped(text) or credential_shaped(plain):
        raise _refused(
            "credential", "text holds something shaped like a credential", "remove it, and replace it where it is used"
        )
    spaced = " ".join(plain.split())
    if any(pattern.search(spaced) for pattern in _OVERRIDE):
        raise _refused("override", "text tries to override earlier instructions", "say what should be done instead")


def _refused(rule: str, message: str, hint: str) -> InstructionRefused:
    return InstructionRefused(f"{message} (rule: {rule})", hint=hint, rule=rule)


def check_requires(value: object) -> list[Any]:
    """The things a release of this instruction would need: at most eight short strings or flat objects of strings."""
    if value is None:
        return []
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise InvalidRequest("requires must be an array", hint=f"it is {kind_of(value)}", param="requires")
    if len(value) > MOST_REQUIRES:
        raise InvalidRequest(f"requires holds more than {MOST_REQUIRES} items", param="requires")
    for item in value:
        for part in item.values() if isinstance(item, Mapping) else (item,):
            _check_item(part)
    return list(value)


def _check_item(part: object) -> None:
    if not isinstance(part, str) or not 0 < len(part.strip()) <= _LONGEST_ITEM:
        raise InvalidRequest(f"every item of requires must be 1 to {_LONGEST_ITEM} characters of text", param="requires")
    if credential_shaped(part):
        raise _refused("credential", "requires holds something shaped like a credential", "name the variable, not its value")
