"""From a receipt to a sample: the checks every recipe for weights makes, with their stable reasons, and what teachers read.

`WeightsRecipe` is the server half most recipes share: one receipt makes one sample, and the settings named in `for_program`
go to the program.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from reef_cli.core.types import Cadence, Extras, Inference, Report, Sample, Surface, TokenSpan
from reef_cli.learning.contract import Acquisition, ProgramSpec, RecipeSettings, Refusal, Target, Tools
from reef_cli.learning.turns import joined


def scored_sample(
    report: Report,
    records: Sequence[Inference],
    step_of: Mapping[str, int],
    *,
    max_temperature: float,
    extras: Mapping[str, Any] | None = None,
    turns: bool = False,
) -> Sample | Refusal:
    """One sample from a report with a finite score; the rest as in `traced_sample`."""
    if report.score is None:
        return Refusal("needs_score")
    if not math.isfinite(report.score):
        return Refusal("score_not_finite")
    return traced_sample(
        report, records, step_of, reward=report.score, max_temperature=max_temperature, extras=extras, turns=turns
    )


def traced_sample(
    report: Report,
    records: Sequence[Inference],
    step_of: Mapping[str, int],
    *,
    reward: float,
    max_temperature: float,
    extras: Mapping[str, Any] | None = None,
    turns: bool = False,
) -> Sample | Refusal:
    """One sample with a given reward from a report that cites one receipt with the engine's own sound trace.

    With `turns` it may cite the receipts of consecutive turns, oldest first, which become one sequence.
    """
    if not records or (len(records) != 1 and not turns):
        return Refusal("needs_single_receipt")
    for record in records:
        if reason := _unsound(record, max_temperature):
            return Refusal(reason)
    tokens = joined([record.tokens for record in records if record.tokens is not None])
    if tokens is None:
        return Refusal("turns_do_not_join")
    producing = tuple(dict.fromkeys(span.version for span in tokens.spans))
    if any(version not in step_of for version in producing):
        return Refusal("unknown_weight_version")
    return Sample(
        id=report.id,
        records=tuple(record.id for record in records),
        tokens=tokens,
        reward=float(reward),
        producing=producing,
        step=min(step_of[version] for version in producing),
        created_at=report.created_at,
        extras=dict(extras or {}),
    )


def _unsound(record: Inference, max_temperature: float) -> str | None:
    """Why an exchange cannot be part of a sample."""
    if not record.complete:
        return "incomplete"
    if record.tokens is None:
        return "no_tokens"
    if fault := record.tokens.fault():
        return fault
    if not any(record.tokens.loss_mask):
        return "nothing_trainable"
    return None if 0 < record.tokens.temperature <= max_temperature else "temperature_out_of_range"


def group_places(report: Report) -> dict[str, Any] | Refusal:
    """The extras that say which group an answer belongs to, from `metadata.group` and `metadata.rollout` of its report."""
    group, rollout = report.metadata.get("group"), report.metadata.get("rollout", "")
    if not isinstance(group, str | int) or isinstance(group, bool) or group == "":
        return Refusal("needs_group")
    return {Extras.GROUP: str(group), Extras.ROLLOUT: str(rollout)}


def conversation(record: Inference) -> dict[str, Any]:
    """The extras a teacher's context is made of: the messages, the tools offered with them, and the answer's text."""
    try:
        request = json.loads(record.request)
    except ValueError:
        request = {}
    tools = request.get("tools") if isinstance(request, dict) else None
    return {
        Extras.MESSAGES: [dict(message) for message in record.messages],
        Extras.TOOLS: tools if isinstance(tools, list) else [],
        Extras.ANSWER: text_of(record.response),
    }


def text_of(message: Mapping[str, Any] | None) -> str:
    """A message's text; parts of other kinds count as nothing."""
    content = (message or {}).get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(str(part.get("text", "")) for part in parts if isinstance(part, Mapping))


def with_teacher_context(sample: Sample, text: str, tools: Tools, *, longest: int) -> Sample:
    """The sample with a teacher that reads `text` in place of the last user message; weight 0 when that does not fit."""
    messages = [dict(message) for message in sample.extras.get(Extras.MESSAGES, ())]
    asked = next((i for i in reversed(range(len(messages))) if messages[i].get("role") == "user"), None)
    if tools.template is None or asked is None:
        return without_weight(sample)
    messages[asked] |= {"content": text}
    prompt = tools.template.render(messages, sample.extras.get(Extras.TOOLS) or ())
    if len(prompt) + len(sample.tokens.output_ids) > longest:
        return without_weight(sample)
    return replace(sample, extras={**sample.extras, Extras.TEACHER_PROMPT_IDS: list(prompt)})


def as_demonstration(sample: Sample, text: str, tools: Tools, *, longest: int) -> Sample:
    """The sample with `text` as its answer, to be imitated: nobody sampled it, so its log-probs are zeros and say nothing.

    Weight 0 when it does not fit, or when the chat template does not tell where an answer ends.
    """
    messages = sample.extras.get(Extras.MESSAGES, ())
    ids = answer_ids(messages, sample.extras.get(Extras.TOOLS) or (), text, tools)
    if not ids or len(sample.tokens.prompt_ids) + len(ids) > longest:
        return without_weight(sample)
    n = len(ids)
    tokens = replace(
        sample.tokens,
        output_ids=ids,
        logprobs=(0.0,) * n,
        loss_mask=(1,) * n,
        spans=(TokenSpan(sample.producing[0], 0, n),),
        temperature=1.0,
    )
    return replace(sample, tokens=tokens)


def answer_ids(
    messages: Sequence[Mapping[str, Any]], offered: Sequence[Mapping[str, Any]], text: str, tools: Tools
) -> tuple[int, ...]:
    """Token ids of an assistant's answer as the chat template would continue the conversation, its end included; else none."""
    if tools.template is None or not text:
        return ()
    before = tools.template.render(messages, offered)
    after = tools.template.render([*messages, {"role": "assistant", "content": text}], offered)
    own = tools.template.encode(text)
    end = len(before) + len(own)
    if after[: len(before)] != before or after[len(before) : end] != own or len(after) <= end:
        return ()
    return (*own, after[end])


def without_weight(sample: Sample) -> Sample:
    """The sample as one that stays in its batch and trains nothing."""
    return replace(sample, extras={**sample.extras, Extras.WEIGHT: 0.0})


def question_of(sample: Sample) -> str:
    """The text of the last user message."""
    messages = sample.extras.get(Extras.MESSAGES, ())
    return next((text_of(message) for message in reversed(messages) if message.get("role") == "user"), "")


class WeightsRecipe:
    """The server half that recipes for weights share. A subclass names itself, its settings and its program."""

    surface: ClassVar[Surface] = Surface.WEIGHTS
    cadence: ClassVar[Cadence] = Cadence.ROLLING
    acquisition: ClassVar[Acquisition] = Acquisition.REACTIVE
    target: ClassVar[Target] = Target.MODEL
    program_path: ClassVar[str]
    for_program: ClassVar[tuple[str, ...]]
    max_temperature: ClassVar[float] = 2.0

    def __init__(self, settings: RecipeSettings) -> None:
        self.settings = settings

    def admit(self, report: Report, records: Sequence[Inference], step_of: Mapping[str, int]) -> Sample | Refusal:
        """One sample per scored receipt; a subclass that adds extras or asks for more overrides this."""
        return scored_sample(report, records, step_of, max_temperature=self.max_temperature)

    def program(self) -> ProgramSpec:
        """The trainer half with its settings."""
        return ProgramSpec(self.program_path, {name: getattr(self.settings, name) for name in self.for_program})
