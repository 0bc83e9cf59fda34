"""What answers inference requests: a local engine, or a provider upstream. Chosen once per deployment."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from reef_cli.gateway.call import Call
from reef_cli.gateway.http import Request, StreamResponse


class Backend(Protocol):
    """Answers calls of every dialect. Raises core errors only before an answer has begun; later ones it writes itself."""

    async def serve(self, call: Call) -> StreamResponse:
        """Answer, streamed or whole, and record. The record is durable before the last byte is out."""
        ...

    async def count_tokens(self, request: Request, raw: bytes, body: Mapping[str, Any], /) -> StreamResponse:
        """Answer `/v1/messages/count_tokens`; nothing is recorded."""
        ...

    async def models(self) -> Sequence[str]:
        """Names a client may send as `model`."""
        ...

    async def close(self) -> None: ...
