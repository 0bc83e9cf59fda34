"""The four wire dialects, each read into and written from one canonical form (OpenAI chat messages)."""

from collections.abc import Mapping, Sequence
from typing import Any

from reef_cli.core.types import Dialect
from reef_cli.gateway.dialects import chat, completions, messages, responses, responses_out
from reef_cli.gateway.dialects.canonical import Answered, ChatRequest, Envelope, Message, StreamEncoder

_PARSE = {"chat": chat.parse, "completions": completions.parse, "messages": messages.parse, "responses": responses.parse}


_MESSAGES = {
    "chat": chat.messages_of,
    "completions": completions.messages_of,
    "messages": messages.messages_of,
    "responses": responses.messages_of,
}


def messages_of(dialect: Dialect, body: Mapping[str, Any]) -> list[Message]:
    """The conversation of a body alone, for records of requests that are passed on unread."""
    return _MESSAGES[dialect](body)


def parse(dialect: Dialect, body: Mapping[str, Any]) -> ChatRequest:
    """Read a request body; `InvalidRequest` and `UnsupportedField` name the field."""
    return _PARSE[dialect](body)


def encode(envelope: Envelope, request: ChatRequest, answers: Sequence[Answered]) -> dict[str, Any]:
    """A whole answer in the request's dialect, ready for JSON."""
    match request.dialect:
        case "chat":
            return chat.encode(envelope, answers)
        case "completions":
            return completions.encode(envelope, answers)
        case "messages":
            return messages.encode(envelope, answers)
        case "responses":
            return responses_out.encode(envelope, request, answers)


def encoder(envelope: Envelope, request: ChatRequest) -> StreamEncoder:
    """A writer of the streamed answer in the request's dialect."""
    match request.dialect:
        case "chat":
            return chat.ChatEncoder(envelope, request)
        case "completions":
            return completions.CompletionsEncoder(envelope, request)
        case "messages":
            return messages.MessagesEncoder(envelope)
        case "responses":
            return responses_out.ResponsesEncoder(envelope, request)
