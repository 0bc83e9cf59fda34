"""Files of experience: an export imports back to the same records, and an interrupted import goes on."""

import io
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from reef_cli.core.errors import ContentConflict, InvalidRequest, MissingDependency, ScenarioNotFound
from reef_cli.core.types import Inference, Report
from reef_cli.experience import export
from reef_cli.experience.log import ExperienceLog

Make = Callable[..., Inference]


@pytest.fixture
async def other(tmp_path: Path) -> AsyncIterator[ExperienceLog]:
    opened = ExperienceLog.open(tmp_path / "other.db")
    await opened.scenarios.ensure("copy")
    yield opened
    opened.close()


async def fill(log: ExperienceLog, make: Make, report: Callable[..., Report], count: int = 30) -> list[Any]:
    records: list[Any] = []
    for number in range(count):
        body = b"\xff\xfe raw" if number == 3 else None
        records.append(make(f"m{number} " * 20, body=body, session=f"run-{number % 3}"))
        await log.append(records[-1])
        if number % 4 == 0:
            records.append(report(records[-1], score=number / 3, feedback={"n": number}))
            await log.report(records[-1])
    await log.instruct("s1", "be brief", record_id="i1")
    return records


def exported(log: ExperienceLog, path: Path, scenario: str = "s1") -> export.Exported:
    with path.open("wb") as out:
        return export.export_jsonl(log, scenario, out)


async def test_an_export_imports_back_to_the_same_records(
    log: ExperienceLog, other: ExperienceLog, make: Make, report: Any, tmp_path: Path
) -> None:
    records = await fill(log, make, report)
    path = tmp_path / "s1.jsonl"
    assert exported(log, path) == export.Exported(len(records) + 1, 0)
    done = await export.import_jsonl(other, "copy", path)
    assert (done.lines, done.new, done.offset) == (len(records) + 1, len(records) + 1, path.stat().st_size)
    again = tmp_path / "again.jsonl"
    exported(other, again, "copy")
    assert again.read_text().replace('"scenario":"copy"', '"scenario":"s1"') == path.read_text()
    # Both into another home and back into its own, nothing is stored twice.
    assert (await export.import_jsonl(other, "copy", path)).new == 0
    assert (await export.import_jsonl(log, "s1", path)).new == 0
    assert log.counts("s1")["records"] == len(records) + 1
    assert not path.with_name(path.name + ".import").exists()


async def test_an_interrupted_import_goes_on_where_it_stopped(
    log: ExperienceLog, other: ExperienceLog, make: Make, report: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "_BATCH_RECORDS", 5)
    await fill(log, make, report)
    path = tmp_path / "s1.jsonl"
    total = exported(log, path).records
    seen: list[export.Imported] = []

    def stop(state: export.Imported) -> None:
        seen.append(state)
        if len(seen) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        await export.import_jsonl(other, "copy", path, stop)
    assert other.counts("copy")["records"] == 15
    done = await export.import_jsonl(other, "copy", path, seen.append)
    assert seen[3].lines == 20
    assert (done.lines, done.new) == (total, total)
    assert other.counts("copy")["records"] == total


async def test_progress_of_another_file_is_not_taken_over(
    log: ExperienceLog, other: ExperienceLog, make: Make, report: Any, tmp_path: Path
) -> None:
    await fill(log, make, report, 5)
    path = tmp_path / "s1.jsonl"
    total = exported(log, path).records
    path.with_name("s1.jsonl.import").write_bytes(
        orjson.dumps({"mark": "foreign", "state": {"lines": 3, "new": 3, "offset": 99, "size": 100}})
    )
    assert (await export.import_jsonl(other, "copy", path)).new == total


async def test_bad_lines_are_named_and_what_came_before_stays(
    log: ExperienceLog, other: ExperienceLog, make: Make, report: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "_BATCH_RECORDS", 2)
    await fill(log, make, report, 5)
    path = tmp_path / "s1.jsonl"
    exported(log, path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:4], b"\n", b'{"kind": \n', *lines[4:]]))
    with pytest.raises(InvalidRequest, match="line 6 is not JSON"):
        await export.import_jsonl(other, "copy", path)
    assert other.counts("copy")["records"] == 4
    changed = orjson.loads(lines[0]) | {"model": "changed"}
    path.write_bytes(orjson.dumps(changed) + b"\n" + lines[1])
    with pytest.raises(ContentConflict, match="lines 1 to 2"):
        await export.import_jsonl(other, "copy", path)


async def test_evicted_records_are_counted_not_written(log: ExperienceLog, make: Make, report: Any, tmp_path: Path) -> None:
    await log.append(make("a"))
    await log.append(make("b", None, complete=False))
    await log.retain(keep_bytes=0)
    assert exported(log, tmp_path / "x.jsonl") == export.Exported(1, 1)


async def test_exports_page_and_resume_after_a_sequence(
    log: ExperienceLog, make: Make, report: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "_PAGE", 3)
    records = await fill(log, make, report, 7)
    whole, rest = io.BytesIO(), io.BytesIO()
    export.export_jsonl(log, "s1", whole)
    export.export_jsonl(log, "s1", rest, after_sequence=4)
    assert whole.getvalue().splitlines()[4:] == rest.getvalue().splitlines()
    assert len(whole.getvalue().splitlines()) == len(records) + 1
    with pytest.raises(ScenarioNotFound):
        export.export_jsonl(log, "nowhere", io.BytesIO())


async def test_parquet_needs_pyarrow_or_writes_the_columns(log: ExperienceLog, make: Make, report: Any, tmp_path: Path) -> None:
    records = await fill(log, make, report, 5)
    path = tmp_path / "x.parquet"
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        with pytest.raises(MissingDependency, match="pyarrow"):
            export.export_parquet(log, "s1", path)
        return
    export.export_parquet(log, "s1", path)
    table = parquet.read_table(path).to_pylist()
    assert [row["id"] for row in table] == [record.id for record in records] + ["i1"]
    assert tuple(table[0]["output_ids"]) == records[0].tokens.output_ids
