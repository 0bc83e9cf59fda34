"""The redaction hook: before anything is written, or nothing is written."""

import copy
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from reef_cli.core.errors import StorageError
from reef_cli.core.types import Inference, Report
from reef_cli.experience.eligibility import eligible
from reef_cli.experience.log import ExperienceLog

Make = Callable[..., Inference]
SECRET = "sk-topsecret-123"


def scrub(value: Any) -> Any:
    """What a deployment would write: the secret goes, wherever it is."""
    if isinstance(value, str):
        if value == "explode":
            raise RuntimeError(f"cannot handle {SECRET}")
        return value.replace(SECRET, "[key]")
    if isinstance(value, dict):
        return {name: scrub(item) for name, item in value.items() if name != "device_id"}
    return [scrub(item) for item in value] if isinstance(value, list) else value


@pytest.fixture
async def guarded(path: Path) -> AsyncIterator[ExperienceLog]:
    opened = ExperienceLog.open(path, redact=scrub)
    await opened.scenarios.ensure("s1")
    yield opened
    opened.close()


def on_disk(path: Path) -> bytes:
    return b"".join(file.read_bytes() for file in path.parent.iterdir() if file.name.startswith(path.name))


async def test_no_byte_of_the_secret_reaches_the_disk(guarded: ExperienceLog, path: Path, make: Make, report: Any) -> None:
    record = make(f"my key is {SECRET}", f"so {SECRET}", raw_text=f"so {SECRET}<|end|>", tags={"t": SECRET}, error=SECRET)
    await guarded.append(record)
    await guarded.report(report(record, feedback={"said": SECRET}, metadata={"k": [SECRET]}))
    await guarded.instruct("s1", f"never say {SECRET}")
    assert SECRET.encode() not in on_disk(path)
    stored = guarded.get("s1", record.id)
    assert isinstance(stored, Inference)
    assert stored.messages[0]["content"] == "my key is [key]"
    assert orjson.loads(stored.request)["messages"][0]["content"] == "my key is [key]"
    assert guarded.page("s1", kind="train")[0].summary == "never say [key]"


async def test_tokens_that_spell_the_secret_go_and_say_so(guarded: ExperienceLog, make: Make) -> None:
    record = make("fine", f"so {SECRET}")
    await guarded.append(record)
    stored = guarded.get("s1", record.id)
    assert isinstance(stored, Inference)
    assert stored.tokens is None
    assert eligible(stored) == (False, "redacted")
    assert guarded.eligibility("s1", [record.id])[0].reason == "redacted"


async def test_untouched_text_keeps_its_tokens_and_bytes(guarded: ExperienceLog, make: Make) -> None:
    spaced = make("fine", body=b'{ "messages" : [{"role": "user", "content": "fine"}] }')
    await guarded.append(spaced)
    assert guarded.get("s1", spaced.id) == spaced
    # Something outside the conversation is taken out: the tokens are still right.
    named = make("fine", body={"metadata": {"device_id": "abc", "user": "u"}})
    await guarded.append(named)
    stored = guarded.get("s1", named.id)
    assert isinstance(stored, Inference)
    assert stored.tokens == named.tokens
    assert orjson.loads(stored.request)["metadata"] == {"user": "u"}


async def test_a_failing_hook_stops_its_record_alone(guarded: ExperienceLog, path: Path, make: Make, report: Any) -> None:
    good = make("fine")
    await guarded.append(good)
    with pytest.raises(StorageError) as caught:
        await guarded.append(make("explode"))
    assert SECRET not in caught.value.message + caught.value.why
    with pytest.raises(StorageError):
        await guarded.report(report(good, feedback="explode"))
    await guarded.append(make("also fine"))
    assert guarded.counts("s1")["records"] == 2


async def test_a_resent_report_is_recognised_in_its_redacted_form(guarded: ExperienceLog, make: Make, report: Any) -> None:
    record = make("fine")
    await guarded.append(record)
    first: Report = report(record, id="g:1", feedback=f"leaks {SECRET}")
    assert await guarded.report(first)
    assert not await guarded.report(replace(first, created_at=9.0))


@pytest.mark.parametrize(
    "hook", [lambda document: None, lambda document: {"kind": "report"}, lambda document: {**document, "kind": "train"}]
)
async def test_hooks_that_return_nonsense_store_nothing(path: Path, make: Make, hook: Any) -> None:
    log = ExperienceLog.open(path, redact=hook)
    await log.scenarios.ensure("s1")
    with pytest.raises(StorageError):
        await log.append(make("x"))
    assert log.counts("s1")["records"] == 0
    log.close()


async def test_identity_is_not_the_hooks_to_change(path: Path, make: Make, report: Any) -> None:
    def hook(document: dict[str, Any]) -> dict[str, Any]:
        changed = copy.deepcopy(document)
        changed |= {"id": "other", "created_at": 5, "scenario": "s2"}
        if "references" in changed:
            changed["references"] = []
        return changed

    log = ExperienceLog.open(path, redact=hook)
    await log.scenarios.ensure("s1")
    record = make("x")
    feedback = report(record)
    await log.append(record)
    await log.report(feedback)
    assert log.get("s1", record.id) == record
    assert log.get("s1", feedback.id) == feedback
    log.close()
