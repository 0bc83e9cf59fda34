"""Files of records: what was written reads back exactly, in both formats, and a bookmark belongs to one file and one place."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reef_cli.core.errors import MissingDependency, UsageError
from reef_cli.core.types import Inference, Report, TokenSpan, TokenTrace
from reef_cli.experience import export
from reef_cli.experience.codec import from_document, to_document
from reef_cli.experience.log import ExperienceLog
from reef_cli.experience.model import Instruction

Make = Callable[..., Inference]


def records(make: Make, report: Callable[..., Report], count: int = 450) -> list[Any]:
    """Exchanges with and without tokens and text, reports, an instruction."""
    made: list[Any] = []
    for number in range(count):
        trace = TokenTrace((1, 2), (3, 4), (-0.1, float("-inf")), (1, 1), (TokenSpan("base", 0, 2),)) if number % 2 else None
        body = b"\xff\xfe raw" if number == 3 else None
        made.append(make(f"m{number} é \u2028 " * 3, body=body, session=f"run-{number % 3}", tokens=trace))
        if number % 4 == 0:
            made.append(report(made[-1], score=number / 3, feedback={"n": number}))
    return [*made, Instruction("i1", "s1", 7.0, "be brief")]  # type: ignore[arg-type]


def documents(made: list[Any]) -> list[dict[str, Any]]:
    """As an API client gets them."""
    return [json.loads(json.dumps({"sequence": n, **to_document(one)})) for n, one in enumerate(made, 1)]


def test_json_lines_read_back(make: Make, report: Any, tmp_path: Path) -> None:
    made = records(make, report)
    path = tmp_path / "s1.jsonl"
    with path.open("w", encoding="utf-8") as out:
        add = export.json_lines(out)
        for document in documents(made):
            add(document)
    found = list(export.read(path))
    assert [number for number, _ in found] == list(range(1, len(made) + 1))
    assert [from_document(document, "s1") for _, document in found] == made
    assert [number for number, _ in export.read(path, after=440)][:2] == [441, 442]
    assert list(export.read_lines(io.StringIO(path.read_text(encoding="utf-8")), "-")) == found


def test_parquet_reads_back_and_has_columns_to_select_by(make: Make, report: Any, tmp_path: Path) -> None:
    files = pytest.importorskip("pyarrow.parquet")
    made = records(make, report)
    path = tmp_path / "s1.parquet"
    with export.parquet(path) as add:
        for document in documents(made):
            add(document)
    assert [from_document(document, "s1") for _, document in export.read(path)] == made
    assert [number for number, _ in export.read(path, after=len(made) - 1)] == [len(made)]
    table = files.read_table(path)
    rows = table.to_pylist()
    assert [row["id"] for row in rows] == [one.id for one in made] and [row["sequence"] for row in rows][:3] == [1, 2, 3]
    trained = next(row for row in rows if row["output_ids"])
    assert (trained["output_ids"], trained["logprobs"], trained["loss_mask"]) == ([3, 4], [-0.1, float("-inf")], [1, 1])
    scored = next(row for row in rows if row["kind"] == "report")
    assert scored["references"] == [made[0].id] and scored["score"] == 0.0
    assert table.schema.field("output_ids").type.value_type == "int32"


def test_a_parquet_file_that_was_not_finished_is_not_there(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    path = tmp_path / "cut.parquet"
    with pytest.raises(KeyboardInterrupt), export.parquet(path) as add:
        add({"id": "a"})
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_files_that_are_no_parquet_are_named(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    files = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "junk.parquet").write_bytes(b"junk")
    files.write_table(pyarrow.table({"other": [1]}), tmp_path / "other.parquet")
    for name in ("junk", "other"):
        with pytest.raises(UsageError, match=f"{name}.parquet is no Parquet file of records"):
            list(export.read(tmp_path / f"{name}.parquet"))


def test_parquet_needs_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(export, "import_module", absent)
    with pytest.raises(MissingDependency, match="pyarrow"), export.parquet(tmp_path / "x.parquet"):
        pass
    with pytest.raises(MissingDependency, match="pyarrow"):
        list(export.read(tmp_path / "x.parquet"))


def test_lines_that_are_not_json_are_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"a": 1}\n\n{"kind": \n')
    with pytest.raises(UsageError, match=r"bad\.jsonl:3 is not JSON"):
        list(export.read(path))


def test_a_bookmark_belongs_to_one_file_and_one_place(tmp_path: Path) -> None:
    path = tmp_path / "s1.jsonl"
    path.write_text("{}\n" * 10)
    mark = export.Bookmark(path, "here s1")
    assert mark.load() == export.Progress()
    mark.save(export.Progress(4, 3))
    assert export.Bookmark(path, "here s1").load() == export.Progress(4, 3)
    assert export.Bookmark(path, "here s2").load() == export.Progress()
    path.write_text("[]\n" * 10)
    assert export.Bookmark(path, "here s1").load() == export.Progress(), "another file under the same name"
    (tmp_path / "s1.jsonl.import").write_text("junk")
    assert export.Bookmark(path, "here s1").load() == export.Progress()
    mark.done()
    assert [file.name for file in tmp_path.iterdir()] == ["s1.jsonl"]


async def test_a_moved_export_is_recognised_where_it_came_from(log: ExperienceLog, make: Make, report: Any) -> None:
    made = records(make, report, 5)[:-1]
    for one in made:
        await (log.append(one) if isinstance(one, Inference) else log.report(one))
    again = [from_document(document, "s1") for document in documents(made)]
    assert await log.import_batch(again) == [False] * len(made)
