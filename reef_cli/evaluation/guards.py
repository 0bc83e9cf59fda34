"""Signs of reward hacking: how a candidate's answers drift in form, and where judge and verifier part ways.

Shown with every verdict; they do not decide, since a recipe may aim at exactly such a change (shorter answers, say).
"""

from collections.abc import Sequence
from typing import Any

from reef_cli.core.ports import Answer
from reef_cli.evaluation.grade import Grade
from reef_cli.evaluation.text import is_looping, is_refusal

# A flag is raised beyond these; both sides answered the same items.
LENGTH_RATIO = 1.5
RATE_SHIFT = 0.1


def drift(candidate: Sequence[Answer], current: Sequence[Answer]) -> dict[str, Any]:
    """Facts of both sides and `flags` in words; empty when there is nothing to compare."""
    if not candidate or not current:
        return {}
    ours, theirs = _facts(candidate), _facts(current)
    flags = [f"{name} {theirs[name]:.2f} -> {ours[name]:.2f}" for name in _RATES if abs(ours[name] - theirs[name]) > RATE_SHIFT]
    ratio = (ours["mean_tokens"] + 1) / (theirs["mean_tokens"] + 1)
    if not 1 / LENGTH_RATIO <= ratio <= LENGTH_RATIO:
        flags.insert(0, f"length {theirs['mean_tokens']:.0f} -> {ours['mean_tokens']:.0f} tokens")
    return {"candidate": ours, "current": theirs, "length_ratio": round(ratio, 4), "flags": flags}


_RATES = ("refused", "empty", "looping", "cut_off", "several_lines", "code_or_json")


def _facts(answers: Sequence[Answer]) -> dict[str, float]:
    texts = [answer.text.strip() for answer in answers]
    count = len(answers)
    return {
        "mean_tokens": round(sum(answer.output_tokens for answer in answers) / count, 3),
        "refused": sum(map(is_refusal, texts)) / count,
        "empty": sum(not text for text in texts) / count,
        "looping": sum(map(is_looping, texts)) / count,
        "cut_off": sum(answer.finish == "length" for answer in answers) / count,
        "several_lines": sum("\n" in text for text in texts) / count,
        "code_or_json": sum(text[:1] in ("{", "[", "`") and text[:1] != "" for text in texts) / count,
    }


def disagreement(candidate: Sequence[Grade], current: Sequence[Grade]) -> dict[str, Any]:
    """Judge against verifier on the answers that have both, and how often a pairwise judge preferred a place to an answer.

    An answer the judge likes and the verifier fails is what a judge that is being gamed looks like.
    """
    sides = {"candidate": _opinions(candidate), "current": _opinions(current)}
    ours, theirs = sides["candidate"], sides["current"]
    facts: dict[str, Any] = {name: side for name, side in sides.items() if side is not None}
    flags = []
    if ours is not None and theirs is not None:
        if ours["judge_only"] - theirs["judge_only"] > RATE_SHIFT:
            flags.append(f"liked by the judge, failed by the verifier {theirs['judge_only']:.2f} -> {ours['judge_only']:.2f}")
        if ours["disagree"] > UNSOUND:
            flags.append(f"judge and verifier disagree on {ours['disagree']:.2f} of the answers")
    if (bias := _bias(candidate)) is not None:
        facts["orders_disagree"] = bias
        if bias > UNSOUND:
            flags.append(f"the judge prefers a place, not an answer, in {bias:.2f} of the comparisons")
    return {**facts, "flags": flags} if facts else {}


# A judge that contradicts the verifier, or itself with the places swapped, this often says little.
UNSOUND = 0.3


def _opinions(grades: Sequence[Grade]) -> dict[str, float] | None:
    both = [
        (grade.judged >= 0.5, grade.verified >= 0.5)
        for grade in grades
        if grade.judged is not None and grade.verified is not None
    ]
    if not both:
        return None
    return {
        "answers": len(both),
        "disagree": round(sum(judged != verified for judged, verified in both) / len(both), 4),
        "judge_only": round(sum(judged and not verified for judged, verified in both) / len(both), 4),
    }


def _bias(grades: Sequence[Grade]) -> float | None:
    compared = [grade for grade in grades if grade.judged is None and grade.verified is None]
    return round(sum(grade.biased for grade in compared) / len(compared), 4) if compared else None
