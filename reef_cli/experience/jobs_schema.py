"""Tables of the learning ledger and of release events, in the experience database so that settlement and consumption commit
together. Written only through `ExperienceLog.write`; their meaning is in `learning.jobs` and `supervisor.publisher`.

`sample_state.grp` names the group a sample trains with (empty: alone), `grp_size` how many complete it, `member` which it is.
`harness` is the content of the harness that was in force when a sample was admitted (empty: none). `observed` is how far into
the stream a recipe that derives reports has looked.

`sample_records` gives each record to at most one sample of a recipe: its primary key is the promise that a record trains once.
"""

import sqlite3

DDL = """
CREATE TABLE jobs (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    scenario TEXT NOT NULL,
    recipe TEXT NOT NULL,
    state TEXT NOT NULL,
    base_release_id TEXT NOT NULL,
    created_at REAL NOT NULL,
    updated_at REAL NOT NULL,
    outcome TEXT,
    reason TEXT,
    content_id TEXT,
    release_id TEXT,
    attempt INTEGER NOT NULL DEFAULT 1,
    detail TEXT NOT NULL DEFAULT '{}'
);
CREATE INDEX jobs_scenario ON jobs (scenario, seq);
CREATE INDEX jobs_open ON jobs (state) WHERE state NOT IN ('settled', 'failed');

CREATE TABLE job_events (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    job_id TEXT NOT NULL REFERENCES jobs (id),
    scenario TEXT NOT NULL,
    at REAL NOT NULL,
    state TEXT NOT NULL,
    detail TEXT NOT NULL DEFAULT '{}'
);
CREATE INDEX job_events_job ON job_events (job_id, seq);

CREATE TABLE sample_state (
    recipe TEXT NOT NULL,
    report_id TEXT NOT NULL,
    scenario TEXT NOT NULL,
    sequence INTEGER NOT NULL,
    state TEXT NOT NULL,
    reason TEXT NOT NULL DEFAULT '',
    job_id TEXT,
    step INTEGER,
    attempts INTEGER NOT NULL DEFAULT 0,
    at REAL NOT NULL,
    PRIMARY KEY (recipe, report_id)
) WITHOUT ROWID;
CREATE INDEX sample_state_queue ON sample_state (scenario, state, sequence);
CREATE INDEX sample_state_job ON sample_state (job_id);

CREATE TABLE sample_records (
    recipe TEXT NOT NULL,
    record_id TEXT NOT NULL,
    report_id TEXT NOT NULL,
    scenario TEXT NOT NULL,
    PRIMARY KEY (recipe, record_id)
) WITHOUT ROWID;
CREATE INDEX sample_records_report ON sample_records (report_id);

CREATE TABLE release_events (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    scenario TEXT NOT NULL,
    release_id TEXT NOT NULL,
    at REAL NOT NULL,
    event TEXT NOT NULL,
    detail TEXT NOT NULL DEFAULT '{}'
);
CREATE INDEX release_events_scenario ON release_events (scenario, seq);
"""


GROUPS = """
ALTER TABLE sample_state ADD COLUMN grp TEXT NOT NULL DEFAULT '';
ALTER TABLE sample_state ADD COLUMN grp_size INTEGER NOT NULL DEFAULT 1;
ALTER TABLE sample_state ADD COLUMN member TEXT NOT NULL DEFAULT '';
CREATE INDEX sample_state_group ON sample_state (scenario, recipe, grp) WHERE grp <> '';
CREATE TABLE observed (
    recipe TEXT NOT NULL,
    scenario TEXT NOT NULL,
    sequence INTEGER NOT NULL,
    PRIMARY KEY (recipe, scenario)
) WITHOUT ROWID
"""


HARNESS = "ALTER TABLE sample_state ADD COLUMN harness TEXT NOT NULL DEFAULT ''"


def create(connection: sqlite3.Connection) -> None:
    """Make the tables; runs inside the migration's transaction."""
    _run(connection, DDL)


def add_groups(connection: sqlite3.Connection) -> None:
    """Groups of samples, and how far recipes have observed."""
    _run(connection, GROUPS)


def add_harness(connection: sqlite3.Connection) -> None:
    """Under which harness samples were admitted."""
    _run(connection, HARNESS)


def _run(connection: sqlite3.Connection, statements: str) -> None:
    for statement in statements.split(";"):
        if statement.strip():
            connection.execute(statement)
