"""What can be said of an answer's text without a model: sentences, emptiness, loops, refusals, and how to show it safely."""

import re
import zlib

# Only words that hardly ever close a sentence; "no." and "etc." may, and then two sentences would pass as one.
_ABBREVIATIONS = frozenset({"mr", "mrs", "ms", "dr", "prof", "st", "vs", "e.g", "i.e", "approx", "cf", "ca", "ph.d"})
_END = re.compile(r"([.!?…]+)([\"'”’)\]]*)(?=\s|$)")
_REFUSAL = re.compile(
    r"\bI(?:'m| am) (?:sorry|unable|not able)|\bI (?:cannot|can't|can not|won't)\b"
    r"|\bas an AI\b|\bI do(?: not|n't) feel comfortable",
    re.IGNORECASE,
)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069]")


def sentence_fault(text: str) -> str | None:
    """Why the text is not exactly one finished sentence; None when it is."""
    text = text.strip()
    if not text:
        return "empty"
    if "\n" in text or "\r" in text:
        return "more than one line"
    ends = [match for match in _END.finditer(text) if _ends_sentence(text, match)]
    if not ends or ends[-1].end() != len(text) or "…" in ends[-1][1]:
        return "not finished"
    return None if len(ends) == 1 else f"{len(ends)} sentences"


def _ends_sentence(text: str, match: re.Match[str]) -> bool:
    if match.end() == len(text) or match[1][-1] in "!?":
        return True
    after = text[match.end() :].lstrip()[:1]
    if len(match[1]) > 1 or "…" in match[1]:
        return not after.islower()
    word = text[: match.start()].rsplit(None, 1)[-1].lstrip("\"'(“[") if text[: match.start()].split() else ""
    if word.lower() in _ABBREVIATIONS:
        return False
    # A single capital is an initial ("J. Bach"); a bare number opens a list ("1. First") or ends a sentence ("in 1999. Then").
    return not (len(word) == 1 and word.isupper() and word != "I")


def is_looping(text: str) -> bool:
    """Whether the text repeats itself over and over, by words or, without spaces, by characters."""
    words = text.split()
    if len(words) >= 24:
        grams = list(zip(words, words[1:], words[2:], strict=False))
        return len(set(grams)) / len(grams) < 0.25
    data = text.encode()
    return len(data) >= 120 and len(zlib.compress(data)) / len(data) < 0.15


def is_refusal(text: str) -> bool:
    """Whether the opening of an answer declines."""
    return _REFUSAL.search(text[:200]) is not None


def printable(text: str, limit: int = 400) -> str:
    """The text as it may be stored in evidence and shown on a terminal: control characters out, length bounded."""
    clean = _CONTROL.sub("", text)
    return clean if len(clean) <= limit else clean[: limit - 1] + "…"
