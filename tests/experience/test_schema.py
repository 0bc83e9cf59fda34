"""Migrations: once, in order, whole; copies before changes; newer databases refused."""

import sqlite3
from pathlib import Path

import pytest

from reef_cli.core.errors import StorageError
from reef_cli.experience.log import ExperienceLog
from reef_cli.experience.schema import MIGRATIONS, Migration, applied, migrate
from reef_cli.experience.writer import connect


def add_table(name: str) -> Migration:
    return Migration(f"900-{name}", lambda connection: connection.execute(f"CREATE TABLE {name} (a)"))  # type: ignore[arg-type, return-value]


def tables(connection: sqlite3.Connection) -> set[str]:
    return {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}


def copies(path: Path) -> list[Path]:
    return sorted(path.parent.glob(f"{path.name}.before-*"))


def test_names_are_unique_and_in_order() -> None:
    names = [migration.name for migration in MIGRATIONS]
    assert names == sorted(set(names))


def test_a_new_database_gets_everything_and_no_copy(path: Path) -> None:
    connection = connect(path, "process")
    assert migrate(connection, path) == [migration.name for migration in MIGRATIONS]
    assert applied(connection) == [migration.name for migration in MIGRATIONS]
    assert migrate(connection, path) == []
    assert {"records", "payloads", "sessions", "scenarios", "citations", "jobs", "sample_state"} <= tables(connection)
    assert copies(path) == []
    connection.close()


async def test_an_existing_database_is_copied_before_it_changes(path: Path) -> None:
    log = ExperienceLog.open(path)
    await log.scenarios.ensure("kept")
    log.close()
    connection = connect(path, "process")
    assert migrate(connection, path, (*MIGRATIONS, add_table("later"))) == ["900-later"]
    assert "later" in tables(connection)
    connection.close()
    (copy,) = copies(path)
    assert copy.stat().st_mode & 0o077 == 0
    old = sqlite3.connect(copy)
    assert "later" not in tables(old)
    assert old.execute("SELECT name FROM scenarios").fetchall() == [("kept",)]
    old.close()


def test_a_newer_database_is_refused_and_left_alone(path: Path) -> None:
    connection = connect(path, "process")
    migrate(connection, path, (*MIGRATIONS, add_table("later")))
    connection.close()
    before = path.read_bytes()
    with pytest.raises(StorageError, match="newer version") as caught:
        ExperienceLog.open(path)
    assert "900-later" in caught.value.why
    assert caught.value.hint
    assert path.read_bytes() == before


def test_a_failing_migration_leaves_nothing_of_itself(path: Path) -> None:
    def broken(connection: sqlite3.Connection) -> None:
        connection.execute("CREATE TABLE half (a)")
        connection.execute("CREATE TABLE half (a)")

    connection = connect(path, "process")
    migrate(connection, path)
    with pytest.raises(StorageError, match="901-broken"):
        migrate(connection, path, (*MIGRATIONS, add_table("fine"), Migration("901-broken", broken)))
    assert applied(connection)[-1] == "900-fine"
    assert "half" not in tables(connection)
    assert not connection.in_transaction
    connection.close()
