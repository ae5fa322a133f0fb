"""The steps on SQLite, and what holds for them on every database."""

import sqlite3
import subprocess
import sys
from contextlib import closing

import pytest
import sqlalchemy as sa
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext

from outbox import migrations
from outbox.errors import ConfigurationError
from outbox.migrations import LATEST, revision
from outbox.migrations.sql import apply, statements
from outbox.store.engine import open_engine
from outbox.tables import SCHEMA_VERSION, Tables, metadata
from tests.alembic_environment import CONVENTION, ROOT, run_alembic

STEPS = range(1, LATEST + 1)


@pytest.fixture
def connection():
    engine = open_engine("sqlite://")
    with engine.begin() as connection:
        yield connection
    engine.dispose()


@pytest.fixture
def wanted():
    engine = open_engine("sqlite://")
    with engine.begin() as connection:
        metadata.create_all(connection)
        result = catalogue(connection)
    engine.dispose()
    return result


def catalogue(connection, schema="main"):
    rows = connection.execute(sa.text(f"SELECT type, name, sql FROM {schema}.sqlite_master"))
    return sorted((kind, name, " ".join((sql or "").split())) for kind, name, sql in rows)


def test_the_steps_end_at_the_version_of_the_tables():
    assert LATEST == SCHEMA_VERSION


def test_the_steps_make_the_tables_of_this_release(connection, wanted):
    apply(connection, STEPS)

    assert catalogue(connection) == wanted


def test_every_partition_gets_its_row(connection):
    apply(connection, STEPS)

    assert list(connection.scalars(sa.text("SELECT partition FROM outbox_partition ORDER BY 1"))) == list(range(64))


def test_up_down_and_up_again(connection, wanted):
    apply(connection, STEPS)
    op = Operations(MigrationContext.configure(connection))
    for version in reversed(STEPS):
        migrations.downgrade(op, version=version)
    assert [name for _, name, _ in catalogue(connection)] == ["sqlite_sequence"]

    apply(connection, STEPS)

    assert catalogue(connection) == wanted


def test_the_sql_does_what_the_steps_do(tmp_path, wanted):
    path = tmp_path / "outbox.db"
    with closing(sqlite3.connect(path)) as database:
        database.executescript("".join(statements("sqlite", version) for version in STEPS))
    engine = open_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        assert catalogue(connection) == wanted
        assert connection.scalar(sa.text("SELECT count(*) FROM outbox_partition")) == 64
    engine.dispose()


def test_the_tables_can_be_in_an_attached_database(tmp_path):
    engine = open_engine(f"sqlite:///{tmp_path / 'main.db'}")
    with engine.connect() as connection:
        connection.connection.cursor().execute(f"ATTACH '{tmp_path / 'app.db'}' AS app")
        apply(connection, STEPS, schema="app")
        assert {name for _, name, _ in catalogue(connection, "app")} >= {table.name for table in Tables()}
        assert catalogue(connection) == []
    engine.dispose()


def test_the_naming_convention_of_the_application_is_left_out(connection, wanted):
    theirs = sa.MetaData(naming_convention=CONVENTION, schema="theirs")
    context = MigrationContext.configure(connection, opts={"target_metadata": theirs})

    migrations.upgrade(Operations(context), version=1)

    assert catalogue(connection) == wanted


@pytest.mark.parametrize("take", [migrations.upgrade, migrations.downgrade])
@pytest.mark.parametrize("version", [0, LATEST + 1])
def test_an_unknown_version_is_refused(take, version):
    with pytest.raises(ConfigurationError, match=rf"no version {version} .* knows 1 to {LATEST}"):
        take(None, version=version)


def test_alembic_is_loaded_only_by_who_calls_it():
    code = "import sys, outbox.migrations.verify; sys.exit('alembic.op' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_a_first_revision_takes_every_step_and_goes_back_in_reverse():
    text = revision.text(range(1, 4), schema="app")

    compile(text, "revision", "exec")
    calls = [line.strip() for line in text.splitlines() if "grade(op" in line]
    assert calls == [
        *(f'outbox.migrations.upgrade(op, version={version}, schema="app")' for version in (1, 2, 3)),
        *(f'outbox.migrations.downgrade(op, version={version}, schema="app")' for version in (3, 2, 1)),
    ]
    assert revision.taken([text]) == 3
    assert revision.taken(["nothing of ours"]) == 0


def test_alembic_works_from_a_checkout_without_any_setting(tmp_path):
    url = f"sqlite:///{tmp_path / 'outbox.db'}"
    for command in (["upgrade", "head"], ["check"], ["downgrade", "base"], ["upgrade", "head"], ["check"]):
        run_alembic(*command, url=url)
    script = run_alembic("upgrade", "head", "--sql", url=url)
    with closing(sqlite3.connect(":memory:")) as database:
        database.executescript(script)
