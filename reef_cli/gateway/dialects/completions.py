"""OpenAI's raw completions: a prompt as text or token ids, no template, no tools.

Several prompts in one request are refused (one record is one exchange). `logprobs` is answered in the old shape: parallel
arrays of tokens, log-probs and text offsets, without alternatives.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from reef_cli.core.errors import InvalidRequest, ReefError, UnsupportedField
from reef_cli.gateway.dialects import chat
from reef_cli.gateway.dialects.canonical import Answered, Body, ChatRequest, Envelope, Fields, Message, Piece, TokenScore, names
from reef_cli.gateway.errors import stream_error
from reef_cli.gateway.sse import data_frame

KNOWN = names(
    "model prompt stream stream_options max_tokens temperature top_p top_k min_p stop seed frequency_penalty "
    "presence_penalty repetition_penalty logit_bias n logprobs echo ignore_eos"
)
DEFAULT_MAX_TOKENS = 16
"""What the dialect documents for a request that names no `max_tokens`."""


def messages_of(body: Body) -> list[Message]:
    """The prompt as the user's words; token ids say nothing here."""
    prompt = _prompt(body.get("prompt"))
    return [{"role": "user", "content": prompt if isinstance(prompt, str) else ""}]


def parse(body: Body) -> ChatRequest:
    """Read a body; the canonical message is the prompt as the user's words."""
    fields = Fields(body)
    prompt = _prompt(body.get("prompt"))
    options = chat.options(fields)
    if fields.body.get("best_of") not in (None, 1, options.n):
        raise UnsupportedField("`best_of` cannot be served.", param="best_of")
    if body.get("logprobs") not in (None, False) and (fields.integer("logprobs", 0) or 0) > 1:
        raise UnsupportedField("`logprobs` above 1 asks for alternatives the engine does not report.", param="logprobs")
    stream_options = fields.mapping("stream_options") or {}
    return ChatRequest(
        dialect="completions",
        model=fields.model(),
        messages=messages_of(body),
        options=options,
        stream=fields.flag("stream") or False,
        include_usage=bool(stream_options.get("include_usage")),
        prompt=prompt,
        echo=fields.flag("echo") or False,
        extra=fields.extra(KNOWN | chat.HARMLESS | {"best_of"}),
        left_out=fields.hints(chat.HARMLESS),
    )


def _prompt(prompt: Any) -> str | list[int]:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and prompt and all(isinstance(token, int) and not isinstance(token, bool) for token in prompt):
        return prompt
    if isinstance(prompt, list) and len(prompt) > 1:
        raise UnsupportedField(
            "Several prompts in one request cannot be served.", hint="Send one request each.", param="prompt"
        )
    raise InvalidRequest("`prompt` must be a string or an array of token ids.", param="prompt")


def _scores(scores: Sequence[TokenScore] | None, edge: int = 0) -> dict[str, Any] | None:
    """Parallel arrays; `edge` is the length of the text before these tokens."""
    if scores is None:
        return None
    offsets = []
    for score in scores:
        offsets.append(edge)
        edge += len(score.token)
    return {
        "tokens": [score.token for score in scores],
        "token_logprobs": [score.logprob for score in scores],
        "top_logprobs": None,
        "text_offset": offsets,
    }


def _choice(
    index: int, text: str, finish: str | None, scores: Sequence[TokenScore] | None = None, edge: int = 0
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": _scores(scores, edge), "finish_reason": finish}


def _finish(answer: Answered) -> str:
    return answer.finish if answer.finish in ("length", "content_filter") else "stop"


def encode(envelope: Envelope, answers: Sequence[Answered]) -> dict[str, Any]:
    """A whole `text_completion` object."""
    return {
        "id": envelope.id,
        "object": "text_completion",
        "created": envelope.created,
        "model": envelope.model,
        "choices": [_choice(i, answer.content or "", _finish(answer), answer.scores) for i, answer in enumerate(answers)],
        "usage": chat.usage_body(chat.total(answers)),
    }


class CompletionsEncoder:
    """Writes a streamed completion: chunks of text, the finish of each choice, usage where asked for, receipt, `[DONE]`."""

    def __init__(self, envelope: Envelope, request: ChatRequest) -> None:
        self._envelope = envelope
        self._include_usage = request.include_usage
        self._told: Counter[int] = Counter()
        self._edge: Counter[int] = Counter()
        self._head = {"id": envelope.id, "object": "text_completion", "created": envelope.created, "model": envelope.model}

    def begin(self) -> bytes:
        return b""

    def push(self, piece: Piece) -> bytes:
        if piece.kind != "text":
            return b""
        choice = _choice(piece.choice, piece.text, None, piece.scores or None, self._edge[piece.choice])
        self._told[piece.choice] += len(piece.scores)
        self._edge[piece.choice] += sum(len(score.token) for score in piece.scores)
        return data_frame({**self._head, "choices": [choice]})

    def keepalive(self) -> bytes:
        return b": keep-alive\n\n"

    def finish(self, answers: Sequence[Answered]) -> bytes:
        out = [data_frame({**self._head, "choices": [self._last(index, answer)]}) for index, answer in enumerate(answers)]
        usage = chat.usage_body(chat.total(answers)) if self._include_usage else None
        if usage is not None:
            out.append(data_frame({**self._head, "choices": [], "usage": usage}))
        if self._envelope.receipt is not None:
            out.append(chat.receipt_frame(self._head, self._envelope.receipt, usage, more=self._envelope.more))
        return b"".join((*out, chat.DONE))

    def _last(self, index: int, answer: Answered) -> dict[str, Any]:
        return _choice(index, "", _finish(answer), chat.untold(answer, self._told[index]), self._edge[index])

    def fail(self, error: ReefError) -> bytes:
        return stream_error("completions", error, self._envelope.request_id)
