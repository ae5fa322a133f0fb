"""`outbox-relay schema` as people use it."""

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa
from click.testing import CliRunner

from outbox.cli.exit import DATABASE, FAILURE, SCHEMA, USAGE
from outbox.cli.schema import schema
from outbox.migrations import LATEST
from tests.alembic_environment import run_alembic, write_environment
from tests.servers.proc import free_port

OURS = "target_metadata = [metadata]"


def run(*arguments, code=0):
    result = CliRunner().invoke(schema, arguments)
    assert result.exit_code == code, result.output
    return result


def execute(url, statement):
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    with engine.begin() as connection:
        connection.execute(sa.text(statement))


@pytest.fixture(params=["postgresql", "sqlite"])
def url(request, tmp_path):
    """An empty database of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'outbox.db'}"
    return request.getfixturevalue("database_url")


@pytest.mark.parametrize("command", [(), ("revision",), ("sql",), ("verify",), ("upgrade",)])
def test_every_command_explains_itself(command):
    text = run(*command, "--help").output

    assert "Example: outbox-relay schema" in text or not command


def test_upgrade_creates_the_tables_once(url):
    assert run("verify", "--database-url", url, code=SCHEMA).stdout.count("the table is missing") == 6
    assert run("upgrade", "--database-url", url).stdout == f"schema version {LATEST}: upgraded\n"
    assert run("upgrade", "--database-url", url).stdout == f"schema version {LATEST}: ok, nothing to do\n"
    assert run("verify", "--database-url", url).stdout == f"schema version {LATEST}: ok\n"


def test_upgrade_refuses_tables_that_differ_and_changes_nothing(url):
    run("upgrade", "--database-url", url)
    execute(url, "DROP INDEX outbox_message_dead_ix")
    execute(url, "DROP TABLE outbox_partition")

    refusal = run("upgrade", "--database-url", url, code=SCHEMA).stderr

    assert "outbox_message: index outbox_message_dead_ix is missing" in refusal
    assert run("verify", "--database-url", url, code=SCHEMA).stdout.splitlines() == [
        "outbox_message: index outbox_message_dead_ix is missing",
        "outbox_partition: the table is missing",
    ]


def test_upgrade_refuses_when_only_some_tables_are_there(url):
    execute(url, "CREATE TABLE processed_messages (id integer)")

    assert "outbox_message: the table is missing" in run("upgrade", "--database-url", url, code=SCHEMA).stderr
    assert "outbox_message: the table is missing" in run("verify", "--database-url", url, code=SCHEMA).stdout


def test_several_upgrades_at_once_do_not_disturb_each_other(database_url):
    # Not by CliRunner, which swaps the standard streams of the whole process.
    def upgrade(_):
        schema.main(["upgrade", "--database-url", database_url], standalone_mode=False)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(upgrade, range(4)))

    run("verify", "--database-url", database_url)


def test_upgrade_and_verify_in_a_named_schema(database_url):
    options = ("--database-url", database_url, "--schema", "app")
    assert run("upgrade", *options, code=FAILURE).stderr == 'Error: database: schema "app" does not exist\n'
    execute(database_url, "CREATE SCHEMA app")

    run("upgrade", *options)

    run("verify", *options)
    run("verify", "--database-url", database_url, code=SCHEMA)


def test_newer_tables_are_well_and_said_to_be_newer(database_url):
    run("upgrade", "--database-url", database_url)
    execute(database_url, "ALTER TABLE outbox_message ALTER schema_version SET DEFAULT 99")

    assert (
        run("verify", "--database-url", database_url).stdout
        == f"schema version 99: ok, newer than the {LATEST} that this release knows\n"
    )
    assert run("upgrade", "--database-url", database_url).stdout == "schema version 99: ok, nothing to do\n"


@pytest.mark.parametrize("command", ["verify", "upgrade"])
def test_a_database_that_is_away_has_an_exit_code_of_its_own(command):
    url = f"postgresql://app:secret@127.0.0.1:{free_port()}/shop"

    error = run(command, "--database-url", url, code=DATABASE).stderr

    assert "Connection refused" in error
    assert "secret" not in error


def test_sql_prints_every_step_or_one_for_the_dialect_asked_for():
    every = run("sql", "--dialect", "sqlite").stdout
    with closing(sqlite3.connect(":memory:")) as database:
        database.executescript(every)
        database.executescript(run("sql", "--dialect", "sqlite", "--downgrade").stdout)
        assert database.execute("SELECT name FROM sqlite_master").fetchall() == [("sqlite_sequence",)]

    assert "CREATE TABLE app.outbox_message" in run("sql", "--version", "1", "--schema", "app").stdout
    assert "JSONB" in run("sql").stdout
    assert "knows 1 to" in run("sql", "--version", str(LATEST + 1), code=USAGE).stderr


def test_revision_is_written_after_the_head_as_the_application_names_its_files(url, tmp_path, monkeypatch):
    folder = write_environment(tmp_path / "shop", url=url, metadata=OURS)
    run_alembic("revision", "-m", "first", folder=folder)
    monkeypatch.chdir(folder)

    path = Path(run("revision", "-m", "add the outbox").stdout.strip())

    assert path.parent == folder / "migrations" / "versions"
    assert path.name.endswith("-add_the_outbox.py")
    assert len(run_alembic("heads", folder=folder).splitlines()) == 1
    run_alembic("upgrade", "head", folder=folder)
    run_alembic("check", folder=folder)
    run("verify", "--database-url", url)
    run_alembic("downgrade", "-1", folder=folder)
    run("verify", "--database-url", url, code=SCHEMA)


def test_revision_is_not_written_twice(tmp_path):
    folder = write_environment(tmp_path, url="sqlite://", metadata=OURS)
    config = str(folder / "alembic.ini")
    run("revision", "--alembic-config", config)

    assert run("revision", "--alembic-config", config).stdout == f"your revisions have version {LATEST} already\n"
    assert len(list((folder / "migrations" / "versions").glob("*.py"))) == 1


def test_revision_says_what_is_wrong_with_the_environment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "there is no alembic.ini" in run("revision", code=USAGE).stderr

    folder = write_environment(tmp_path, url="sqlite://", metadata=OURS)
    for name in ("one", "two"):
        run_alembic("revision", "-m", name, "--head", "base", folder=folder)
    assert "Multiple heads" in run("revision", code=USAGE).stderr


def test_revision_to_paste_needs_no_environment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    text = run("revision", "--stdout", "--schema", "app").stdout

    assert 'outbox.migrations.upgrade(op, version=1, schema="app")' in text
    assert list(tmp_path.iterdir()) == []
