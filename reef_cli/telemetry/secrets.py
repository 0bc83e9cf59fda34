"""What a credential looks like, and how to hide one. Shared by the log filter and the screening of instructions.

The shapes are those of keys in wide use; a match is a strong hint, never a proof. Masking keeps the first characters, so that a
person can tell which key it was, and nothing else.
"""

import re
from collections.abc import Iterable

_SHAPES = (
    r"\b(?:sk|pk|rk)-[A-Za-z0-9_-]{16,}",  # OpenAI, Anthropic (sk-ant-...), Stripe-like with dashes
    r"\b(?:sk|pk|rk)_(?:live|test)_[A-Za-z0-9]{10,}",
    r"\bgh[pousr]_[A-Za-z0-9]{20,}",
    r"\bgithub_pat_[A-Za-z0-9_]{20,}",
    r"\bglpat-[A-Za-z0-9_-]{16,}",
    r"\bhf_[A-Za-z0-9]{20,}",
    r"\bxox[abeoprs]-[A-Za-z0-9-]{10,}",
    r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    r"\bAIza[0-9A-Za-z_-]{30,}",
    r"\bey[A-Za-z0-9_-]{10,}\.ey[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]*",  # JSON web tokens
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
)
_NAMED = re.compile(
    r"(?i)\b(bearer|basic)\s+([A-Za-z0-9._~+/=-]{8,})"
    r"|\b((?:api|access|auth|secret|private)[_-]?(?:key|token)|x-api-key|password|passwd|token|secret)"
    r"""(["']?\s*[:=]\s*["']?)([^\s"',;&]{6,})"""
)
SHAPED = re.compile("|".join(_SHAPES))
MASK = "[redacted]"


def credential_shaped(text: str) -> bool:
    """Whether the text holds something that looks like a credential."""
    return SHAPED.search(text) is not None or _NAMED.search(text) is not None


def mask(text: str, known: Iterable[str] = ()) -> str:
    """The text with known secrets and everything credential-shaped replaced by `[redacted]`."""
    for secret in known:
        text = text.replace(secret, MASK)
    text = SHAPED.sub(lambda match: match[0][:3] + MASK, text)
    return _NAMED.sub(lambda match: f"{match[1]} {MASK}" if match[1] else f"{match[3]}{match[4]}{MASK}", text)
