"""The space of guidance: the policy writes only advice, a frozen executor turns parent and advice into a solution.

The policy sees the parent's summary and value, never its text; the executor sees the text and the advice. Exactly one guidance
block, not empty and at the end of the answer, or the try scores 0 without asking the executor. Where the inner space is for
small models the block's opening is given as the start of the answer and its end stops it. A failing executor is an outage and
stops the step; nothing is asked twice.
"""

import re
from collections.abc import Callable
from dataclasses import replace

from reef_cli.discovery.problem import Ask, Made, Space, State, Unusable

OPEN, CLOSE = "<guidance>", "</guidance>"
_SOLUTION = re.compile(r"<solution>(.*?)</solution>", re.DOTALL)
_SUMMARY = re.compile(r"<summary>(.*?)</summary>", re.DOTALL)
MAX_TOKENS = 96
SUMMARY_CHARACTERS = 600

Executor = Callable[[Ask, int], str]
"""The frozen model's answer to a prompt, sampled with a seed."""


class GuidanceSpace:
    """Advice on the solutions of `inner`, carried out by `executor`."""

    def __init__(self, inner: Space, executor: Executor, goal: str) -> None:
        self.name = f"guidance-{inner.name}"
        self._inner, self._executor, self._goal = inner, executor, goal

    def ask(self, parent: State) -> Ask:
        summary = parent.summary or "nothing but a plain first solution"
        prompt = (
            f"{self._goal}\nThe solution so far: {summary}\nIts value: {parent.value:.6g}\n"
            f"Advise another model how to change it for a larger value. End with one block {OPEN}your advice{CLOSE}."
        )
        if self._inner.ask(parent).chat:
            return Ask(prompt, chat=True, max_tokens=MAX_TOKENS)
        return Ask(f"{prompt}\n{OPEN}", max_tokens=MAX_TOKENS // 3, stop=(CLOSE, "\n"))

    def make(self, parent: State, text: str, seed: int) -> Made:
        asked = self._inner.ask(parent)
        advice = guidance_of(text if asked.chat else f"{OPEN}{text.partition(CLOSE)[0]}{CLOSE}")
        answer = self._executor(_advised(asked, advice), seed)
        solution = _SOLUTION.search(answer)
        made = self._inner.make(parent, solution[1] if solution else answer, seed)
        told = _SUMMARY.search(answer)
        summary = (told[1].strip() if told else f"{advice} ({made.text[:120]})")[:SUMMARY_CHARACTERS]
        return replace(made, summary=summary)


def _advised(asked: Ask, advice: str) -> Ask:
    if not asked.chat:
        return replace(asked, prompt=f"Advice: {advice}\n{asked.prompt}")
    form = "Put the answer between <solution> and </solution> and one sentence about it between <summary> and </summary>."
    return replace(asked, prompt=f"{asked.prompt}\n\nAdvice: {advice}\n\n{form}")


def guidance_of(text: str) -> str:
    """The one terminal guidance block. Raises `Unusable`."""
    body = text.strip()
    if body.count(OPEN) != 1 or body.count(CLOSE) != 1 or not body.endswith(CLOSE):
        raise Unusable("no_guidance")
    advice = " ".join(body[body.index(OPEN) + len(OPEN) : -len(CLOSE)].split())
    if not advice:
        raise Unusable("empty_guidance")
    return advice
