"""`manifest.json`: a release as text, and back. The one place that knows the file's keys.

A manifest never changes after its commit. Whether a release is pending or restorable is not in it: that is the state of the
refs and of the store, found out when reading.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from reef_cli.core.errors import InvalidRequest, StorageError
from reef_cli.core.ids import ContentId, JobId, ReleaseId
from reef_cli.core.types import Operation, Release, Surface

VERSION = 1


@dataclass(frozen=True, slots=True)
class Entry:
    """A release as its commit tells it, with the objects its content needs."""

    release: Release
    large: tuple[tuple[str, int], ...]


def encode(release: Release, large: tuple[tuple[str, int], ...], size: int) -> bytes:
    """The manifest's bytes. `InvalidRequest` when the evidence is not JSON (NaN included)."""
    facts = {
        "manifest": VERSION,
        "release_id": release.release_id,
        "scenario": release.scenario,
        "parent_release_id": release.parent_release_id,
        "content_id": release.content_id,
        "kind": release.kind,
        "surface": str(release.surface),
        "operation": str(release.operation),
        "step": release.step,
        "recorded_at": release.recorded_at,
        "author": release.author,
        "job_id": release.job_id,
        "source_release_id": release.source_release_id,
        "gated": release.gated,
        "bytes": size,
        "objects": [{"oid": oid, "size": length} for oid, length in large],
        "evidence": dict(release.evidence),
    }
    try:
        return json.dumps(facts, indent=1, allow_nan=False, ensure_ascii=False, default=_plain).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise InvalidRequest("the evidence of a release must be JSON with finite numbers", why=str(error)) from error


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


def decode(data: bytes, commit: str) -> Entry:
    """The release a manifest describes. `StorageError` when it is none."""
    try:
        facts: dict[str, Any] = orjson.loads(data)
        if facts["manifest"] != VERSION:
            raise ValueError(f"manifest version {facts['manifest']!r}")
        release = Release(
            release_id=ReleaseId(facts["release_id"]),
            scenario=facts["scenario"],
            parent_release_id=_optional(facts["parent_release_id"], ReleaseId),
            content_id=ContentId(facts["content_id"]),
            kind=facts["kind"],
            surface=Surface(facts["surface"]),
            operation=Operation(facts["operation"]),
            step=facts["step"],
            recorded_at=facts["recorded_at"],
            author=facts["author"],
            evidence=facts["evidence"],
            job_id=_optional(facts["job_id"], JobId),
            source_release_id=_optional(facts["source_release_id"], ReleaseId),
            gated=facts["gated"],
            commit=commit,
        )
        return Entry(release, tuple((item["oid"], item["size"]) for item in facts["objects"]))
    except (KeyError, TypeError, ValueError) as error:
        raise StorageError(
            f"commit {commit[:12]} holds no readable manifest", why=str(error), hint="run `reef release verify`"
        ) from error


def _optional(value: str | None, make: Any) -> Any:
    return None if value is None else make(value)
