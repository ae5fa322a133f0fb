"""The steps, alembic and `verify` on PostgreSQL."""

import psycopg
import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext

from outbox import migrations
from outbox.errors import SchemaError
from outbox.migrations import LATEST
from outbox.migrations.sql import apply, statements
from outbox.migrations.verify import require, verify
from outbox.tables import Tables, attach, metadata
from tests.alembic_environment import CONVENTION, run_alembic, write_environment

STEPS = range(1, LATEST + 1)

# Three texts that PostgreSQL itself gives for all that a schema holds.
CATALOGUE = """
SELECT 'column', table_name || '.' || column_name, concat_ws(' ', ordinal_position, data_type, is_nullable, column_default,
       is_identity, identity_generation, collation_name)
FROM information_schema.columns WHERE table_schema = :schema
UNION ALL
SELECT 'index', indexname, replace(indexdef, schemaname || '.', '') FROM pg_indexes WHERE schemaname = :schema
UNION ALL
SELECT 'constraint', conname, pg_get_constraintdef(oid) FROM pg_constraint WHERE connamespace = to_regnamespace(:schema)
ORDER BY 1, 2
"""


@pytest.fixture
def engine(database_url):
    engine = sa.create_engine(database_url, poolclass=sa.NullPool)
    yield engine
    engine.dispose()


@pytest.fixture
def wanted(engine):
    """What `create_all` makes, which is then dropped again."""
    with engine.begin() as connection:
        metadata.create_all(connection)
        found = catalogue(connection)
        metadata.drop_all(connection)
    return found


def catalogue(connection, schema="public"):
    rows = connection.execute(sa.text(CATALOGUE), {"schema": schema})
    return [tuple(row) for row in rows if not row[1].startswith("alembic_version")]


def partitions(connection, schema="public"):
    return list(connection.scalars(sa.text(f"SELECT partition FROM {schema}.outbox_partition ORDER BY 1")))


def test_the_steps_make_the_tables_of_this_release(engine, wanted):
    assert {name for kind, name, _ in wanted if kind == "index"} > {"outbox_message_pending_ix", "processed_messages_pk"}
    with engine.begin() as connection:
        apply(connection, STEPS)

        assert catalogue(connection) == wanted
        assert partitions(connection) == list(range(64))
        assert verify(connection, Tables()) == []


def test_autogenerate_finds_nothing_to_do_even_in_server_defaults(engine):
    with engine.begin() as connection:
        apply(connection, STEPS)
        context = MigrationContext.configure(connection, opts={"compare_server_default": True, "compare_type": True})

        assert compare_metadata(context, metadata) == []


def test_alembic_from_a_checkout_goes_up_and_down_and_up(engine, database_url, wanted):
    run_alembic("upgrade", "head", url=database_url)
    run_alembic("check", url=database_url)
    run_alembic("downgrade", "base", url=database_url)
    with engine.connect() as connection:
        assert catalogue(connection) == []

    run_alembic("upgrade", "head", url=database_url)

    run_alembic("check", url=database_url)
    with engine.connect() as connection:
        assert catalogue(connection) == wanted


@pytest.mark.parametrize("by", ["alembic", "statements"])
def test_offline_sql_makes_the_same(engine, database_url, wanted, by):
    script = (
        run_alembic("upgrade", "head", "--sql", url=database_url)
        if by == "alembic"
        else "".join(statements("postgresql", version) for version in STEPS)
    )
    with psycopg.connect(sa.make_url(database_url).set(drivername="postgresql").render_as_string(False)) as connection:
        connection.execute(script)

    with engine.begin() as connection:
        assert catalogue(connection) == wanted
        assert partitions(connection) == list(range(64))
        for version in reversed(STEPS):
            connection.exec_driver_sql(statements("postgresql", version, direction="downgrade"))
        assert catalogue(connection) == []


def test_a_named_schema_gets_the_same_tables(engine, wanted):
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE SCHEMA app"))
        apply(connection, STEPS, schema="app")

        assert [row for row in catalogue(connection) if row[0] != "column"] == []
        assert catalogue(connection, "app") == wanted
        assert partitions(connection, "app") == list(range(64))
        assert verify(connection, Tables(schema="app")) == []
        assert "outbox_message: the table is missing" in verify(connection, Tables())


def test_the_naming_convention_of_the_application_is_left_out(engine, wanted):
    theirs = sa.MetaData(naming_convention=CONVENTION, schema="theirs")
    with engine.begin() as connection:
        context = MigrationContext.configure(connection, opts={"target_metadata": theirs})
        migrations.upgrade(Operations(context), version=1)

        assert catalogue(connection) == wanted


@pytest.mark.parametrize("schema", [None, "app"])
def test_tables_in_the_metadata_of_an_application_stay_clean(engine, database_url, tmp_path, schema):
    base = f"target_metadata = sa.MetaData(naming_convention={CONVENTION!r})\nattach(target_metadata, schema={schema!r})"
    folder = write_environment(tmp_path, url=database_url, metadata=base, include_schemas=schema is not None)
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE SCHEMA app"))
        apply(connection, STEPS, schema=schema)
        assert verify(connection, attach(sa.MetaData(schema="other"), schema=schema)) == []

    run_alembic("check", folder=folder)


def test_a_step_that_fails_leaves_nothing_behind(engine):
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE processed_messages (id int)"))

    with pytest.raises(sa.exc.ProgrammingError, match="already exists"), engine.begin() as connection:
        apply(connection, STEPS)

    with engine.connect() as connection:
        assert [name for _, name, _ in catalogue(connection)] == ["processed_messages.id"]


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ("DROP INDEX outbox_message_pending_ix", "index outbox_message_pending_ix is missing"),
        (
            "DROP INDEX outbox_message_pending_ix; CREATE INDEX outbox_message_pending_ix ON outbox_message (partition, id)",
            "index outbox_message_pending_ix is (CREATE INDEX outbox_message_pending_ix ON outbox_message (partition, id)), should",
        ),
        (
            "DROP INDEX outbox_message_dead_ix; CREATE INDEX outbox_message_dead_ix ON outbox_message (id) WHERE state = 'sent'",
            "index outbox_message_dead_ix is",
        ),
        (
            "DROP INDEX outbox_message_dead_ix; CREATE INDEX outbox_message_dead_ix ON outbox_message USING brin (id)",
            "index outbox_message_dead_ix is",
        ),
        ("UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'outbox_message_held_ix'::regclass", "is invalid"),
        ("ALTER TABLE outbox_message DROP COLUMN holds", "index outbox_message_held_ix is missing"),
        ("ALTER TABLE outbox_message ALTER topic TYPE varchar(9)", "column topic is (topic VARCHAR(9) NOT NULL)"),
        ("ALTER TABLE outbox_message ALTER sent_at TYPE timestamp", "column sent_at is"),
        ("ALTER TABLE outbox_message ALTER created_at DROP DEFAULT", "column created_at is"),
        ("ALTER TABLE outbox_message ALTER id DROP IDENTITY", "column id is"),
        ("ALTER TABLE outbox_message ALTER topic DROP NOT NULL", "column topic is"),
        ("ALTER TABLE outbox_message DROP CONSTRAINT outbox_message_state_ck", "constraint outbox_message_state_ck is missing"),
        ("ALTER TABLE outbox_message DROP CONSTRAINT outbox_message_message_id_uq", "outbox_message_message_id_uq is missing"),
        ("ALTER TABLE processed_messages DROP CONSTRAINT processed_messages_pk", "constraint processed_messages_pk is missing"),
        ("DELETE FROM outbox_partition WHERE partition IN (3, 5)", "outbox_partition: no row for partition 3, 5"),
        ("DROP TABLE processed_messages", "processed_messages: the table is missing"),
    ],
)
def test_every_difference_is_found(engine, change, difference):
    with engine.begin() as connection:
        apply(connection, STEPS)
        connection.exec_driver_sql(change)

        found = verify(connection, Tables())

        assert any(difference in line for line in found), found
        with pytest.raises(SchemaError, match="No revision mends this"):
            require(connection, Tables())


@pytest.mark.filterwarnings("ignore:Did not recognize type")
def test_what_was_added_is_no_difference(engine):
    with engine.begin() as connection:
        apply(connection, STEPS)
        connection.exec_driver_sql(
            "ALTER TABLE outbox_message ADD tenant text, ADD place point;"
            "CREATE INDEX by_tenant ON outbox_message (lower(tenant));"
            "ALTER TABLE outbox_message ALTER id SET CACHE 10"
        )

        assert verify(connection, Tables()) == []


def test_an_empty_database_is_answered_with_the_revision_to_paste(engine):
    with engine.connect() as connection, pytest.raises(SchemaError, match=r"outbox\.migrations\.upgrade\(op, version=1\)"):
        require(connection, Tables())
