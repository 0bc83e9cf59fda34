"""Ports: how rooms of one layer reach each other without importing each other. The supervisor plugs them together.

`Generation` is what anything that wants tokens sees; `Serving` adds releases; `Training` is the trainer subprocess;
`Evaluating` is the gate; `LearningPort` is what the gateway may ask of the learning worker.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from reef_cli.core.ids import ReleaseId
from reef_cli.core.types import Candidate, Draft, Release, Sample, Surface, TokenSpan, Verdict


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters in SGLang's names; None keeps the model's context as the only limit on new tokens."""

    max_new_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    min_new_tokens: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    @property
    def trainable(self) -> bool:
        """Whether the engine's log-probs are the behaviour policy's own (no truncation, no penalties)."""
        return (
            self.top_p == 1.0
            and self.top_k in (-1, 0)
            and self.min_p == 0.0
            and self.frequency_penalty == self.presence_penalty == 0.0
            and self.repetition_penalty == 1.0
            and not self.logit_bias
            and self.temperature > 0
        )


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Tokens in. `release` None means the engine's base weights; else the release must have been made servable.

    Where a release replaces all weights of the engine, a request that waited for a push is answered by the newer weights, and
    its spans say so; `pinned` asks for exactly this release instead.
    """

    input_ids: Sequence[int]
    sampling: Sampling
    release: Release | None = None
    rid: str | None = None
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class Completion:
    """Tokens out, as the engine emitted them. `finish` is `stop`, `length` or `abort`; `matched` the stop string or token."""

    text: str
    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Literal["stop", "length", "abort"]
    spans: tuple[TokenSpan, ...]
    prompt_tokens: int
    cached_tokens: int = 0
    matched: int | str | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of a streamed answer; the last one carries the whole completion.

    `tokens` are those sampled since the piece before, each with its log-prob. Text may lag behind them, where a character or a
    possible stop string is not whole yet.
    """

    text: str
    completion: Completion | None = None
    tokens: Sequence[tuple[int, float]] = ()


class Generation(Protocol):
    """Produces tokens. Raises `EngineUnavailable`, `PushTimeout`, `ContextOverflow`, `EngineError`.

    Closing the iterator of `stream` (or cancelling `generate`) aborts the request in the engine at once.
    """

    async def generate(self, request: GenerateRequest) -> Completion: ...

    def stream(self, request: GenerateRequest) -> AsyncIterator[Delta]: ...


class Serving(Generation, Protocol):
    """A local engine together with the releases it has loaded."""

    async def load(self, release: Release, directory: Path | None) -> None:
        """Make a release servable (LoRA adapter loaded, or full weights swapped in) and verify it.

        `directory` holds the artifact's files; None is base weights. Idempotent. Full weights replace what the engine runs,
        LoRA adapters stand beside each other. On failure the old weights serve everywhere.
        """
        ...

    async def unload(self, release: Release) -> None:
        """Drop a LoRA adapter that nothing routes to any more; waits for requests that use it."""
        ...

    async def reachable(self) -> None:
        """Raises `EngineUnavailable` while the engine, or one of several, does not answer."""
        ...

    def version_of(self, release: Release) -> str:
        """The weight version label answers of this release carry."""
        ...

    def servable(self, release: Release) -> bool: ...

    async def info(self) -> Mapping[str, Any]:
        """Model path, kind, weight version, loaded adapters, queue: for status pages; no secrets."""
        ...


@dataclass(frozen=True, slots=True)
class TrainerProgress:
    """A heartbeat of the trainer subprocess: phase in words and done/total units of it."""

    phase: str
    done: int
    total: int
    at: float


@dataclass(frozen=True, slots=True)
class Reference:
    """Weights a step is compared with; `directory` None is the base model."""

    directory: Path | None


class Training(Protocol):
    """The trainer subprocess. Every call raises `TrainerError` when it dies, with the cause and the log's tail."""

    async def train(
        self,
        scenario: str,
        base: Release,
        base_directory: Path | None,
        checkpoint: Path | None,
        samples: Sequence[Sample],
        out: Path,
        on_progress: Callable[[TrainerProgress], None] | None = None,
        reference: Reference | None = None,
    ) -> Candidate:
        """One step from the state that belongs to `base`.

        With a `reference` the metrics have `kl_to_gated`: how far the candidate is from those weights, in nats per token.

        `checkpoint` is that state on disk (None: start afresh from the base artifact's weights); the trainer reloads it
        only when its memory holds another state. The candidate is written under `out`, fsynced, before this returns.
        """
        ...

    async def push(self, scenario: str, directory: Path, version: str, engine_url: str) -> Mapping[str, Any]:
        """Send full or merged weights of a candidate into the engine through a process group; returns phase times."""
        ...

    async def stop(self) -> None: ...


class Evaluating(Protocol):
    """The gate. Raises `EvaluationError` for an outage; a candidate's own failure is a verdict."""

    async def smoke(self, scenario: str, candidate: Release, current: Release) -> Verdict:
        """Quick checks of a rolling step: finite metrics, bounded drift, a few items."""
        ...

    async def gate(
        self, scenario: str, candidate: Release, current: Release, on_progress: Callable[[int, int], None] | None = None
    ) -> Verdict:
        """The full paired evaluation of a candidate against a release that is served."""
        ...


@dataclass(frozen=True, slots=True)
class ParsedMessage:
    """A model's raw text read by its own conventions: text, reasoning, and tool calls in OpenAI's shape."""

    content: str | None
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    reasoning: str | None = None


class ChatTemplate(Protocol):
    """The model's tokenizer and chat template; light enough for the gateway's process (no torch)."""

    context_length: int

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Prompt token ids, generation prompt included. Accepts canonical chat messages: `developer` and late `system`
        roles, content as text, parts or null, tool calls and tool results. Raises `UnsupportedField` for images and audio."""
        ...

    def text(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """The prompt's text; `render` encodes it. Raises the same."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def marked_by_special(self, tools: bool) -> bool:
        """Whether `parse` needs the special tokens of an answer's text, with tools offered or without."""
        ...

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedMessage: ...


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer produced for an evaluation or a judge. `cost` is what the provider says it charged, in its currency."""

    text: str
    output_tokens: int
    finish: str
    completion: Completion | None = None
    prompt_tokens: int = 0
    cost: float | None = None

    @property
    def only_reasoning(self) -> bool:
        """Whether the tokens ran out before anything was written but reasoning, which providers keep apart from the text."""
        thinking = "<think>" in self.text and "</think>" not in self.text
        return self.finish == "length" and (thinking or not self.text.strip())


class Answering(Protocol):
    """Answers a conversation as a release would, outside the record (nothing of it becomes experience)."""

    async def answer(self, messages: Sequence[Mapping[str, Any]], sampling: Sampling, release: Release | None) -> Answer: ...


class Publishing(Protocol):
    """The one road by which a release reaches users: chain (CAS) -> engine -> routing. Used by jobs and by people.

    `served` is the release at a surface's head that is in force now: of weights the one requests get, which follows the chain
    once the engine has loaded and verified it; of the harness the one agents are offered. Before a surface has a release of its
    own that is the creation release.
    Raises `HeadMoved`, `NotPending`, `NotRestorable`, `ReleaseNotFound`, `StorageError`, `EngineError`.
    """

    def served(self, scenario: str, surface: Surface = Surface.WEIGHTS) -> Release: ...

    async def reachable(self) -> None:
        """Raises `EngineUnavailable` while new weights could reach nobody."""
        ...

    async def stage(self, candidate: Release) -> None:
        """Make a candidate servable to the evaluation only; nothing a client gets changes."""
        ...

    async def unstage(self, candidate: Release) -> None: ...

    async def publish(self, scenario: str, draft: Draft, expected_head: ReleaseId) -> Release: ...

    async def hold(self, scenario: str, draft: Draft, expected_head: ReleaseId) -> Release: ...

    async def promote(self, scenario: str, release_id: ReleaseId, expected_head: ReleaseId | None, author: str) -> Release: ...

    async def rollback(
        self,
        scenario: str,
        release_id: ReleaseId | None,
        expected_head: ReleaseId | None,
        author: str,
        evidence: Mapping[str, Any] | None = None,
        surface: Surface | None = None,
    ) -> Release: ...

    async def resolve(self, scenario: str, pin: ReleaseId | None, session: str | None) -> Release:
        """The release a request gets: the pin (404 unknown, 409 not servable, 503 while loading) or the routing policy's."""
        ...


class LearningPort(Protocol):
    """What the gateway may ask of the learning worker; all calls answer at once and never wait for a job."""

    def wake(self, scenario: str) -> None:
        """New records or reports are visible."""
        ...

    def state(self, scenario: str) -> Mapping[str, Any]:
        """`{state, phase, done, total, job_id, last_outcome, queue, …}` for the status page."""
        ...

    def eligibility(self, scenario: str, report_id: str) -> Mapping[str, str]:
        """Reason per reference of a stored report, as the recipe sees it: `eligible` or a refusal."""
        ...
