"""Records, reports and a chat template for the tests of recipes; a learner on the toy model, in this process."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from reef_cli.core.ids import RecordId
from reef_cli.core.ports import ParsedMessage
from reef_cli.core.types import Inference, Report, Sample, TokenSpan, TokenTrace
from reef_cli.learning.contract import ProgramSpec, Refusal, Tools
from reef_cli.trainer.learner import Learner
from tests.trainer.conftest import TOY

STEPS = {"base": 0}
START, ANSWER, END = 1, 2, 3


class Letters:
    """A chat template of single-letter tokens: `START role letters END` for each message, then `START ANSWER`."""

    context_length = 4096

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        ids: list[int] = []
        for message in messages:
            ids += [START, ANSWER if message["role"] == "assistant" else 4, *self.encode(message["content"]), END]
        return [*ids, START, ANSWER]

    def encode(self, text: str) -> list[int]:
        return [5 + ord(letter) % 90 for letter in text]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        raise NotImplementedError

    def text(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        raise NotImplementedError

    def marked_by_special(self, tools: bool) -> bool:
        raise NotImplementedError

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedMessage:
        raise NotImplementedError


TOOLS = Tools(template=Letters())


def record(name: str = "r1", question: str = "ask", answer: str = "say", **changes: Any) -> Inference:
    """One exchange in the letters' tokens."""
    messages = [{"role": "user", "content": question}]
    output = (*Letters().encode(answer), END)
    n = len(output)
    trace = TokenTrace(tuple(Letters().render(messages)), output, (-4.5,) * n, (1,) * n, (TokenSpan("base", 0, n),))
    whole = {
        "id": RecordId(name), "scenario": "s", "created_at": 1.0, "dialect": "chat", "model": "m", "request": b"{}",
        "messages": messages, "response": {"role": "assistant", "content": answer}, "tokens": trace,
    }  # fmt: skip
    return Inference(**(whole | changes))


def report(name: str = "p1", *receipts: str, **changes: Any) -> Report:
    return Report(RecordId(name), "s", 2.0, tuple(RecordId(one) for one in receipts or ("r1",)), **changes)


def admitted(recipe: Any, number: int, answer: str = "say", **told: Any) -> Sample:
    """A sample of the recipe's own making."""
    one = record(f"r{number}", answer=answer)
    fate = recipe.admit(report(f"p{number}", one.id, **told), [one], STEPS)
    assert isinstance(fate, Sample), fate
    return fate


def refused(recipe: Any, *records: Inference, **told: Any) -> str:
    fate = recipe.admit(report("p1", *(one.id for one in records), **told), records, STEPS)
    assert isinstance(fate, Refusal), fate
    return fate.reason


def learner(model: Path, spec: ProgramSpec) -> Learner:
    return Learner(model, spec.path, spec.settings, replace(TOY, precision="fp32"))


def on_policy(lab: Learner, samples: Sequence[Sample]) -> list[Sample]:
    """The samples with the policy's own log-probs, as an engine in perfect agreement would have recorded them."""
    found = []
    for item, row in zip(samples, lab.score(None, samples), strict=True):
        found.append(replace(item, tokens=replace(item.tokens, logprobs=tuple(row))))
    return found
