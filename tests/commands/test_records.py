"""`reef records export` and `import` where something is missing or breaks off."""

import json
from pathlib import Path
from typing import Any

from tests.commands.runner import Reef
from tests.control.fake_reef import FakeReef, Reply, record


def test_an_interrupted_import_goes_on_where_it_stopped(reef: Reef, server: FakeReef, tmp_path: Path) -> None:
    (tmp_path / "all.jsonl").write_text("".join(json.dumps({"id": str(number)}) + "\n" for number in range(500)))

    def fails_once(_: Any, body: Any) -> Reply:
        if len(server.asked("POST", "/reef/records/batch")) == 3:
            return 400, {"error": {"code": "invalid_request", "message": "record 7: it is odd"}}
        return 200, {"stored": len(body["records"])}

    server.overrides["POST", "/reef/records/batch"] = fails_once
    broken = reef("records", "import", "all.jsonl")
    assert broken.code == 2 and "in the batch from line 401; 400 lines before it are imported" in broken.err
    assert (tmp_path / "all.jsonl.import").exists()
    other = reef("records", "import", "all.jsonl", "-s", "other", "--json")
    assert other.json["received"] == 500, "another place starts at the beginning"
    assert not (tmp_path / "all.jsonl.import").exists()

    server.requests.clear()
    assert reef("records", "import", "all.jsonl").code == 2
    again = reef("records", "import", "all.jsonl")
    assert again.code == 0 and "going on after line 400" in again.err and "100 of 100 records were new" in again.out
    sent = [row["id"] for _, body, _ in server.asked("POST", "/reef/records/batch")[3:] for row in body["records"]]
    assert sent == [str(number) for number in range(400, 500)]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("all")] == ["all.jsonl"]


def test_evicted_records_are_counted_not_fatal(reef: Reef, server: FakeReef, tmp_path: Path) -> None:
    server.records = [record(1, evicted_at=7.0), record(2), record(3)]
    server.overrides["GET", f"/reef/scenarios/default/records/{3:032x}"] = lambda *_: (
        404,
        {"error": {"code": "record_not_found", "message": "gone since the page was read"}},
    )
    server.overrides["GET", f"/reef/scenarios/default/records/{2:032x}"] = lambda *_: (200, record(2))
    done = reef("records", "export", "all.jsonl", "--json")
    assert done.json == {"scenario": "default", "exported": 1, "evicted": 2, "file": "all.jsonl"}
    assert len((tmp_path / "all.jsonl").read_text().splitlines()) == 1


def test_files_that_cannot_be_used_are_the_callers_mistake(reef: Reef, tmp_path: Path) -> None:
    (tmp_path / "latin.jsonl").write_bytes(b'{"id": "\xe9"}\n')
    for file in ("absent.jsonl", ".", "latin.jsonl", "absent.parquet"):
        done = reef("records", "import", file)
        assert done.code == 2 and f"cannot read {file}" in done.err, done.err
    done = reef("records", "export", "no/such/folder.jsonl")
    assert done.code == 2 and "cannot write no/such/folder.jsonl" in done.err, done.err
