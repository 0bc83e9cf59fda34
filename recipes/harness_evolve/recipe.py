"""Harness evolution: what goes badly, what people ask for and what they edit becomes a better harness, or is undone.

This half says which reports count. A window of failures becomes a proposal, the proposal a candidate tree, and the candidate is
released only when the same tasks go better with it than without it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from reef_cli.core.errors import ConfigError
from reef_cli.core.types import Cadence, Inference, Report, Sample, Surface, TokenTrace
from reef_cli.learning.contract import Acquisition, Group, ProgramSpec, RecipeSettings, Refusal, Signal, Target
from reef_cli.learning.evolving import Evolution, Kind

NO_TOKENS = TokenTrace((), (), (), (), ())
"""Words teach here; a sample has no trace."""

LONGEST = 20_000
"""Characters of a conversation that go into a sample; of a longer one the last messages."""

ALWAYS_FRESH = 1 << 30
"""The step of what people ask for: it never grows stale."""


@dataclass(frozen=True, slots=True)
class HarnessEvolveSettings(RecipeSettings):
    """Settings of harness evolution beside those of every recipe."""

    batch_size: int = 8
    """Failures per proposal. What people ask for or edit makes a job of its own at once."""

    max_staleness: int = 2
    """Failures under a harness this many releases old are dropped, alone, and counted."""

    max_score: float = 0.0
    """Reports scored above this are no failures."""

    proposer: str = "reef_cli.harness.proposers:RepeatedFeedback"
    """Dotted path of what proposes edits; `reef_cli.harness.proposers:LanguageModel` asks a model."""

    proposer_settings: Mapping[str, Any] = field(default_factory=dict)
    """What the proposer is made with."""

    proposer_engine: Mapping[str, Any] = field(default_factory=dict)
    """Another engine for the proposer: url, model, api_key_file (mode 0600). Empty: the deployment's own."""

    adapter: str = "native"
    """The agent whose episodes judge candidates."""

    adapter_version: str | None = None
    """Its pinned version; absent: the adapter's first."""

    tasks: str | None = None
    """Folder of coding tasks with unit tests, used beside `evaluation.suite`."""

    task_attempts: int = 1
    """How often each side works on a coding task; few tasks show something only when they are tried several times."""

    episodes_at_once: int = 2
    """Episodes that run at the same time."""

    episode_seconds: float = 600.0
    """Longest episode."""

    episode_requests: int = 40
    """Most model calls of an episode."""

    episode_tokens: int | None = None
    """Most input and output tokens of an episode."""

    episode_cost: float | None = None
    """Most an episode may cost, at `evaluation.price_prompt` and `evaluation.price_output`."""

    episode_executor: Literal["local", "ray"] = "local"
    """Where episodes run: in this server's machine, or as tasks of Ray (extra `ray`)."""

    ray_address: str | None = None
    """The Ray cluster; absent: one on this machine, started and ended with the server."""

    episode_sandbox: Literal["required", "unsafe"] = "required"
    """Whether episodes may run without a sandbox; `unsafe` lets an agent do everything its user may do."""

    promote: int = 0
    """Most failing prompts that become tasks of the evaluation; needs `promote_grader`."""

    promote_grader: Mapping[str, Any] = field(default_factory=dict)
    """Grader of promoted prompts, as in a suite."""

    def __post_init__(self) -> None:
        least = ("batch_size", "episodes_at_once", "episode_seconds", "episode_requests", "task_attempts")
        wrong = [name for name in least if not getattr(self, name) > 0]
        if self.promote < 0 or (self.promote and not self.promote_grader):
            wrong.append("promote")
        if self.ray_address and self.episode_executor != "ray":
            raise ConfigError("ray_address does nothing while episodes run here", hint="episode_executor: ray")
        if unknown := set(self.proposer_engine) - {"url", "model", "api_key_file"}:
            raise ConfigError(
                f"proposer_engine has no key {sorted(unknown)[0]!r}", hint="its keys are url, model, api_key_file"
            )
        if wrong:
            raise ConfigError(
                f"harness evolution cannot work with this {wrong[0]}: {getattr(self, wrong[0])}",
                hint="see recipes/harness_evolve/README.md",
            )


class HarnessEvolveRecipe:
    """Failures and wishes become edits of the harness; an edit stays only when it was shown better."""

    name: ClassVar[str] = "harness_evolve"
    title: ClassVar[str] = "Harness evolution: edit prompts, rules and skills from feedback, keep what is shown better"
    surface: ClassVar[Surface] = Surface.HARNESS
    cadence: ClassVar[Cadence] = Cadence.GATED
    settings_type: ClassVar[type[RecipeSettings]] = HarnessEvolveSettings
    signal: ClassVar[Signal] = Signal("score and text", "user")
    acquisition: ClassVar[Acquisition] = Acquisition.REACTIVE
    target: ClassVar[Target] = Target.HARNESS

    def __init__(self, settings: HarnessEvolveSettings) -> None:
        self.settings = settings

    def admit(self, report: Report, records: Sequence[Inference], step_of: Mapping[str, int]) -> Sample | Refusal:  # noqa: ARG002 - the contract's
        """A failure, or what somebody asked for; else a stable reason. Its age is that of the harness it was made under."""
        if not records:
            return _asked(report)
        if report.score is not None and report.score > self.settings.max_score:
            return Refusal("not_failing")
        last = records[-1]
        if last.response is None:
            return Refusal("no_answer")
        producing = tuple(dict.fromkeys(span.version for record in records if record.tokens for span in record.tokens.spans))
        extras = {
            "kind": Kind.FAILURE,
            "score": report.score,
            "feedback": _text(report.feedback),
            "session": last.session or "",
            "prompt": _prompt(records[0].messages),
            "answer": str(last.response.get("content") or ""),
            "messages": _tail(last.messages),
        }
        return Sample(
            id=report.id,
            records=tuple(record.id for record in records),
            tokens=NO_TOKENS,
            reward=report.score if report.score is not None else self.settings.max_score,
            producing=producing,
            step=0,
            created_at=report.created_at,
            extras=extras,
        )

    def group(self, sample: Sample) -> Group:
        """What a person asks for or edits is a job of its own: mixed with others its verdict would say nothing."""
        alone = sample.extras["kind"] != Kind.FAILURE
        return Group(f"{sample.extras['kind']} {sample.id}", 0) if alone else Group("", 1)

    def program(self) -> ProgramSpec:
        """The proposer with its settings."""
        return ProgramSpec(self.settings.proposer, dict(self.settings.proposer_settings))

    def evolution(self) -> Evolution:
        """How candidates are judged."""
        given = self.settings
        return Evolution(
            adapter=given.adapter,
            version=given.adapter_version,
            tasks=given.tasks,
            attempts=given.task_attempts,
            at_once=given.episodes_at_once,
            seconds=given.episode_seconds,
            requests=given.episode_requests,
            tokens=given.episode_tokens,
            cost=given.episode_cost,
            unsafe=given.episode_sandbox == "unsafe",
            ray=(given.ray_address or "") if given.episode_executor == "ray" else None,
            engine=given.proposer_engine,
            promote=given.promote,
            promote_grader=given.promote_grader,
        )


def _asked(report: Report) -> Sample | Refusal:
    """A sample of a report that cites nothing: what Reef stores when somebody asks for a change or proposes an edit."""
    given = report.feedback
    if not isinstance(given, Mapping) or given.get("kind") not in (Kind.REQUEST, Kind.PROPOSAL):
        return Refusal("needs_receipt")
    extras = {**given, "feedback": str(given.get("text", ""))}
    return Sample(report.id, (), NO_TOKENS, 0.0, (), ALWAYS_FRESH, report.created_at, extras)


def _text(feedback: str | Mapping[str, Any] | None) -> str:
    if isinstance(feedback, Mapping):
        return str(feedback.get("text", ""))
    return feedback or ""


def _prompt(messages: Sequence[Mapping[str, Any]]) -> str:
    """What the user asked first, when it is plain text."""
    asked = next((message.get("content") for message in messages if message.get("role") == "user"), "")
    if isinstance(asked, list):
        texts = [part.get("text", "") for part in asked if isinstance(part, Mapping)]
        return "\n".join(texts)
    return asked if isinstance(asked, str) else ""


def _tail(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The last messages that fit into `LONGEST` characters, system prompts left out: the tree has those."""
    kept: list[dict[str, Any]] = []
    room = LONGEST
    for message in reversed(messages):
        if message.get("role") in ("system", "developer"):
            continue
        room -= len(str(message))
        if room < 0:
            break
        kept.append(dict(message))
    return kept[::-1]
