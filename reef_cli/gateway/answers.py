"""JSON answers and the forms in which facts leave the server. Field names here are the HTTP contract."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson

from reef_cli.core.types import Release
from reef_cli.gateway.http import Response


def answer(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON answer; dataclasses and enums become objects and strings, NaN becomes null."""
    return Response(
        status=status,
        body=orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS, default=_plain),
        content_type="application/json",
        headers=headers or (),
    )


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence | set | frozenset) and not isinstance(value, bytes):
        return list(value)
    return str(value)


def release_view(release: Release, heads: Iterable[Release | None]) -> dict[str, Any]:
    """One release as the catalogue shows it; `current` is whether it is the head of a surface."""
    return {
        "release_id": release.release_id,
        "scenario": release.scenario,
        "parent_release_id": release.parent_release_id,
        "content_id": release.content_id,
        "kind": release.kind,
        "surface": release.surface.value,
        "operation": release.operation.value,
        "current": any(head is not None and release.release_id == head.release_id for head in heads),
        "pending": release.pending,
        "step": release.step,
        "recorded_at": release.recorded_at,
        "author": release.author,
        "evidence": release.evidence,
        "restorable": release.restorable,
        "gated": release.gated,
        "job_id": release.job_id,
        "source_release_id": release.source_release_id,
        "commit": release.commit,
    }
