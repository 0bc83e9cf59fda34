"""SQL over a log that is being written: views, whole records by function, and nothing but reading."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from reef_cli.core.errors import InvalidRequest, NotFoundError, StorageError
from reef_cli.experience import sql
from reef_cli.experience.codec import to_document
from reef_cli.experience.log import ExperienceLog
from tests.commands.runner import shell_at
from tests.experience.conftest import Conversation, make_report

FOREVER = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n"


@pytest.fixture
async def filled(log: ExperienceLog, path: Path) -> Path:
    """Three turns of a session, the first two scored, one of them twice."""
    talk = Conversation(log, release_id="r1-0")
    first, second = await talk.say("one"), await talk.say("two")
    await talk.say("three", release_id="r2-0")
    await log.report(make_report(first, score=0.5, feedback="half"))
    await log.report(make_report(first, second, score=1.0))
    return path


async def test_views_say_what_people_ask(filled: Path, log: ExperienceLog) -> None:
    by_release = sql.query(filled, "SELECT release_id, avg(score), count(*) FROM feedback GROUP BY 1", 10)
    assert (by_release.columns[0], by_release.rows, by_release.more) == ("release_id", [("r1-0", 2.5 / 3, 3)], False)
    rows = sql.query(filled, "SELECT sequence, id, kind FROM experience ORDER BY 1", 3)
    assert [row[2] for row in rows.rows] == ["inference"] * 3 and rows.more
    assert [row[0] for row in rows.rows] == [row.sequence for row in log.page("s1", limit=3)]
    assert sql.query(filled, "SELECT feedback FROM feedback WHERE feedback IS NOT NULL", 9).rows == [("half",)]


async def test_a_whole_record_is_the_one_that_was_stored(filled: Path, log: ExperienceLog) -> None:
    for identity, text in sql.query(filled, "SELECT id, document(sequence) FROM experience", 9).rows:
        record = log.get("s1", identity)
        assert record is not None and json.loads(text) == json.loads(json.dumps(to_document(record)))
    assert sql.query(filled, "SELECT document(999)", 1).rows == [(None,)]


async def test_every_view_and_table_can_be_asked(filled: Path) -> None:
    found = sql.tables(filled)
    assert list(found)[:2] == ["experience", "feedback"] and {"records", "sessions", "citations", "jobs"} <= set(found)
    for name, columns in found.items():
        assert sql.query(filled, f"SELECT * FROM {name}", 5).columns == tuple(columns)


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM records",
        "ATTACH '{folder}/other.db' AS other",
        "PRAGMA query_only = 0",
        "PRAGMA writable_schema = 1",
        "CREATE TEMP TABLE t (x)",
        "VACUUM INTO '{folder}/copy.db'",
        "BEGIN",
        "SELECT load_extension('x')",
        "SELECT 1; DELETE FROM records",
        "SELEC",
        "SELECT * FROM nothing",
        "",
    ],
)
async def test_nothing_but_one_select(filled: Path, tmp_path: Path, statement: str) -> None:
    files = {file.name for file in tmp_path.rglob("*")}
    with pytest.raises(InvalidRequest):
        sql.query(filled, statement.format(folder=tmp_path), 10)
    assert {file.name for file in tmp_path.rglob("*")} == files
    assert sql.query(filled, "SELECT count(*) FROM records", 1).rows == [(5,)]


def test_no_log_and_what_is_no_log(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="does not exist"):
        sql.query(tmp_path / "experience.db", "SELECT 1", 1)
    (tmp_path / "experience.db").write_bytes(b"no database " * 100)
    with pytest.raises(StorageError, match="cannot read"):
        sql.tables(tmp_path / "experience.db")


async def test_the_command(filled: Path, tmp_path: Path) -> None:
    reef = shell_at(tmp_path, REEF_HOME=str(filled.parent))
    asked = "SELECT kind, count(*) AS n FROM experience GROUP BY 1"
    assert reef("records", "query", asked).out == "inference\t3\nreport\t2\n"
    assert reef("records", "query", asked, "--json").json == {
        "rows": [{"kind": "inference", "n": 3}, {"kind": "report", "n": 2}],
        "more": False,
    }
    cut = reef("records", "query", asked, "--csv", "--limit", "1")
    assert cut.out == "kind,n\ninference,3\n" and "more than 1 rows" in cut.err
    refused = reef("records", "query", "DROP TABLE records")
    assert refused.code == 2 and "not authorized" in refused.err
    assert reef("records", "tables").out.startswith("experience\tsequence, id, scenario")


async def test_ctrl_c_ends_a_long_query(filled: Path) -> None:
    code = "import sys; from pathlib import Path; from reef_cli.experience import sql; print('on', flush=True)\n"
    code += f"sql.query(Path(sys.argv[1]), {FOREVER!r}, 1)"
    with subprocess.Popen([sys.executable, "-c", code, str(filled)], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"on\n"
        try:
            time.sleep(0.3)
            os.kill(process.pid, signal.SIGINT)
            assert process.wait(20) != 0
        finally:
            process.kill()
