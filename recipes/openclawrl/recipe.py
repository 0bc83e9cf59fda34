"""OpenClaw-RL: learn from what happens after each turn of live sessions; no reports are needed.

The next message of a session says whether the turn before it was good, and often how it should have been. A judge reads that:
votes become a reward, hints become what a teacher reads. This half observes sessions and makes the reports itself; the
tensor half is `program.py`. Source: arXiv:2603.10165.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from recipes.openclawrl.judge import Judge, ModelJudge, by_words, load
from recipes.openclawrl.observer import SessionObserver
from reef_cli.config.off_policy import OffPolicy
from reef_cli.core.errors import ConfigError
from reef_cli.core.types import Extras, Inference, Report, Sample
from reef_cli.learning.contract import RecipeSettings, Refusal, Signal, Tools, is_derived
from reef_cli.learning.samples import WeightsRecipe, conversation, question_of, scored_sample
from reef_cli.learning.settings import check

HINTED = "{question}\n\n[user's hint / instruction]\n{hint}"
HINTS = 3
"""Different hints a turn is taught with at most."""

TEACHER_PROMPTS = "teacher_prompts"
"""Entry of a sample's extras: token ids of each context a teacher reads before the turn's answer."""


@dataclass(frozen=True, slots=True)
class OpenClawRLSettings(RecipeSettings):
    """Settings of OpenClaw-RL beside those of every recipe."""

    batch_size: int = 16
    """Judged turns per training step."""

    policy_lr: float = 2e-4
    """Learning rate of the LoRA adapter; use about 1e-5 with `trainer.method: full`."""

    judge: str = "words"
    """Who reads the next state: `words` (rules, no model), `engine` (the served base model), or `module:function`."""

    votes: int = 3
    """Independent votes of an `engine` judge, and as many chances for a hint."""

    judge_temperature: float = 0.6
    """Sampling temperature of an `engine` judge."""

    judge_tokens: int = 512
    """Longest answer of an `engine` judge in tokens."""

    judge_concurrency: int = 8
    """Turns judged at once."""

    session_ttl_s: float = 900.0
    """A turn is no longer waited for when its session has been quiet this long."""

    reward_weight: float = 1.0
    """Weight of the votes (binary reward)."""

    vote_baseline: bool = False
    """Whether a batch's mean vote is taken off each of its votes; off is the paper's."""

    hint_weight: float = 1.0
    """Weight of the hints (distillation from the hinted teacher); 0 learns from votes alone."""

    top_k: int = 4
    """Likeliest tokens of the policy the teacher is compared on; 0 compares the sampled token alone."""

    hint_choice: Literal["sequence", "token", "shortest"] = "sequence"
    """Which of several hints teaches: that with the largest overlap over the answer, or per token, or the shortest."""

    teacher: Literal["base", "self"] = "base"
    """Whose weights read the hint: the frozen base, or the policy itself."""

    gap_clip: float = 1.0
    """Largest difference of log-probs a token learns from."""

    max_teacher_tokens: int = 8192
    """Longer teacher contexts are left out."""

    off_policy: Mapping[str, Any] = field(default_factory=dict)
    """The shared block; `decoupled` with bounds 0.8 and 1.28 unless it says otherwise."""

    def __post_init__(self) -> None:
        check(
            self,
            positive=("policy_lr", "votes", "judge_tokens", "judge_concurrency", "session_ttl_s", "gap_clip"),
            natural=("reward_weight", "hint_weight", "top_k"),
        )
        if self.reward_weight == 0 and self.hint_weight == 0:
            raise ConfigError("reward_weight and hint_weight are both 0: nothing would be learned", hint="leave one at 1")
        if self.judge not in ("words", "engine") and ":" not in self.judge:
            raise ConfigError(f"judge {self.judge!r} is unknown", hint="words, engine, or module:function")
        OffPolicy.of(self.off_policy, kind="decoupled", high=1.28)


class OpenClawRLRecipe(WeightsRecipe):
    """Votes and hints read from the next state of each turn."""

    name: ClassVar[str] = "openclawrl"
    title: ClassVar[str] = "OpenClaw-RL: learn from what happens after each turn of live sessions, without reports"
    signal: ClassVar[Signal] = Signal("votes and hints about the next state", "a judge")
    settings_type: ClassVar[type[RecipeSettings]] = OpenClawRLSettings
    settings: OpenClawRLSettings
    program_path: ClassVar[str] = "recipes.openclawrl.program:OpenClawRLProgram"
    for_program: ClassVar[tuple[str, ...]] = (
        "policy_lr", "reward_weight", "vote_baseline", "hint_weight", "top_k", "hint_choice", "teacher", "gap_clip",
        "off_policy",
    )  # fmt: skip

    def observer(self, scenario: str, tools: Tools) -> SessionObserver:
        """Watches one scenario's sessions."""
        s = self.settings
        return SessionObserver(
            self.name,
            scenario,
            self._judge(tools),
            tools,
            ttl_s=s.session_ttl_s,
            concurrency=s.judge_concurrency,
            hints=HINTS,
        )

    def _judge(self, tools: Tools) -> Judge:
        s = self.settings
        if s.judge == "words":
            return by_words
        if s.judge == "engine":
            if tools.answering is None:
                raise ConfigError("judge: engine needs an engine that answers", hint="judge: words, or module:function")
            return ModelJudge(tools.answering, s.votes, s.judge_temperature, s.judge_tokens)
        return load(s.judge)

    def admit(self, report: Report, records: Sequence[Inference], step_of: Mapping[str, int]) -> Sample | Refusal:
        """A judged turn; clients' own reports are kept and do not train."""
        if not is_derived(self.name, report):
            return Refusal("only_judgements_train")
        hints = [str(hint) for hint in report.metadata.get("hints", ())]
        if not report.score and not (hints and self.settings.hint_weight):
            return Refusal("says_nothing")
        told = {} if not records else conversation(records[0])
        return scored_sample(report, records, step_of, max_temperature=self.max_temperature, extras={**told, "hints": hints})

    def assemble(self, samples: Sequence[Sample], tools: Tools) -> list[Sample]:
        """The contexts a turn's teacher reads: one per hint; without any the unchanged prompt, which holds it to the base."""
        return [self._taught(sample, tools) for sample in samples]

    def _taught(self, sample: Sample, tools: Tools) -> Sample:
        prompts = [prompt for hint in sample.extras["hints"] if (prompt := self._hinted(sample, hint, tools))]
        own = [list(sample.tokens.prompt_ids)]
        return replace(sample, extras={**sample.extras, TEACHER_PROMPTS: prompts or own})

    def _hinted(self, sample: Sample, hint: str, tools: Tools) -> list[int]:
        messages = [dict(message) for message in sample.extras.get(Extras.MESSAGES, ())]
        asked = next((i for i in reversed(range(len(messages))) if messages[i].get("role") == "user"), None)
        if tools.template is None or asked is None:
            return []
        messages[asked] |= {"content": HINTED.format(question=question_of(sample), hint=hint)}
        prompt = tools.template.render(messages, sample.extras.get(Extras.TOOLS) or ())
        return list(prompt) if len(prompt) + len(sample.tokens.output_ids) <= self.settings.max_teacher_tokens else []
