"""What `verify` sees, on SQLite; and the comparison of definitions that each database words in its own way."""

import pytest
from sqlalchemy.schema import CreateTable

from outbox.errors import SchemaError
from outbox.migrations import LATEST
from outbox.migrations.catalogue import same
from outbox.migrations.sql import statements
from outbox.migrations.verify import installed_version, missing_steps, require, verify
from outbox.store.engine import open_engine
from outbox.tables import Tables

TABLES = Tables()
SQL = statements("sqlite", 1)
VERSION_MARK = "schema_version SMALLINT DEFAULT 1"


@pytest.fixture
def database():
    engine = open_engine("sqlite://")
    with engine.connect() as connection:
        yield connection
    engine.dispose()


def run(connection, script):
    for statement in filter(None, map(str.strip, script.split(";"))):
        connection.exec_driver_sql(statement)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("state IN ('a', 'b')", "(state = ANY (ARRAY['a'::text, 'b'::text]))"),
        ("state IN ('a', 'b')", "((state)::text = ANY ((ARRAY['a'::character varying, 'b'::character varying])::text[]))"),
        ("state = 'pending'", "(\"state\" = 'pending'::text)"),
        ("(state = 'sent') = (sent_at IS NOT NULL)", "((state = 'sent'::text) = (sent_at IS NOT NULL))"),
        ("a IS NOT NULL AND (b = 1 OR c = 2 AND d = 3)", "((a IS NOT NULL) AND ((b = 1) OR ((c = 2) AND (d = 3))))"),
        ("DEFAULT (now())", "default now()"),
        ("UNIQUE (a)", "UNIQUE NULLS DISTINCT (a)"),
    ],
)
def test_the_same_in_other_words(ours, theirs):
    assert same(ours, theirs)


@pytest.mark.parametrize(
    ("ours", "other"),
    [
        ("state = 'pending'", "state = 'Pending'"),
        ("state = 'pending'", "state <> 'pending'"),
        ("n >= 0", "n > 0"),
        ("a AND (b OR c)", "a AND b OR c"),
        ("state IN ('a', 'b')", "state IN ('a')"),
        ("UNIQUE (a)", "UNIQUE NULLS NOT DISTINCT (a)"),
        ("(a, b)", "(b, a)"),
    ],
)
def test_not_the_same(ours, other):
    assert not same(ours, other)


def test_nothing_to_say_about_the_right_tables(database):
    run(database, SQL)

    assert verify(database, TABLES) == []
    assert require(database, TABLES) == installed_version(database, TABLES) == LATEST
    assert list(missing_steps(database, TABLES)) == []


@pytest.mark.parametrize(
    ("right", "wrong", "difference"),
    [
        ("topic TEXT NOT NULL", "topic VARCHAR(10) NOT NULL", "column topic is (topic VARCHAR(10) NOT NULL)"),
        ("topic TEXT NOT NULL", "topic TEXT", "column topic is (topic TEXT), should be (topic TEXT NOT NULL)"),
        ("last_error TEXT", "last_error TEXT NOT NULL", "column last_error is"),
        ("attempts INTEGER DEFAULT 0", "attempts INTEGER DEFAULT 1", "column attempts is"),
        ("attempts INTEGER DEFAULT 0", "attempts INTEGER", "column attempts is"),
        ("content_type TEXT NOT NULL,", "", "column content_type is missing"),
        ("WHERE state = 'scheduled'", "WHERE state = 'pending'", "index outbox_message_scheduled_ix is"),
        (" WHERE state = 'pending';", ";", "index outbox_message_pending_ix is"),
        ("(partition, id)", "(id, partition)", "index outbox_message_pending_ix is"),
        ("INDEX outbox_message_pending_ix", "UNIQUE INDEX outbox_message_pending_ix", "index outbox_message_pending_ix is"),
        ("outbox_message_held_ix", "another_ix", "index outbox_message_held_ix is missing"),
        ("UNIQUE (message_id)", "CHECK (id > 0)", "constraint outbox_message_message_id_uq is"),
        ("outbox_message_state_ck", "another_ck", "constraint outbox_message_state_ck is missing"),
        ("'sent', 'dead'))", "'sent'))", "constraint outbox_message_state_ck is"),
        ("PRIMARY KEY (consumer, message_id)", "PRIMARY KEY (message_id)", "constraint processed_messages_pk is"),
        (", (63)", "", "outbox_partition: no row for partition 63"),
    ],
)
def test_every_difference_is_found(database, right, wrong, difference):
    assert right in SQL

    run(database, SQL.replace(right, wrong))

    found = verify(database, TABLES)
    assert any(difference in line for line in found), found
    with pytest.raises(SchemaError, match="No revision mends this"):
        require(database, TABLES)


def test_what_was_added_is_no_difference(database):
    run(database, SQL)
    run(database, "ALTER TABLE outbox_message ADD COLUMN tenant TEXT; CREATE INDEX by_tenant ON outbox_message (tenant)")

    assert verify(database, TABLES) == []


def test_newer_tables_pass_and_are_told_apart(database):
    run(database, SQL.replace(VERSION_MARK, "schema_version SMALLINT DEFAULT 9"))

    assert verify(database, TABLES) == []
    assert require(database, TABLES) == installed_version(database, TABLES) == 9
    assert list(missing_steps(database, TABLES)) == []


def test_tables_without_the_mark_of_a_version_count_as_the_first(database):
    run(database, SQL.replace(VERSION_MARK, "schema_version SMALLINT"))

    assert installed_version(database, TABLES) == 1
    assert len(verify(database, TABLES)) == 1


def test_without_tables_the_error_ends_with_the_revision_to_paste(database):
    assert list(missing_steps(database, TABLES)) == list(range(1, LATEST + 1))
    with pytest.raises(SchemaError) as raised:
        require(database, Tables(schema="main"))

    message = str(raised.value)
    assert "main.outbox_message: the table is missing" in message
    assert "outbox-relay schema revision --schema main" in message
    assert 'outbox.migrations.upgrade(op, version=1, schema="main")' in message
    assert "outbox-relay schema upgrade --schema main" in message


def test_no_revision_is_offered_when_some_tables_are_there(database):
    run(database, SQL)
    run(database, "DROP TABLE outbox_message")

    assert list(missing_steps(database, TABLES)) == []
    assert verify(database, TABLES) == ["outbox_message: the table is missing"]


def test_verify_leaves_the_tables_of_the_library_as_they_were(database):
    before = str(CreateTable(TABLES.message).compile(database))
    run(database, SQL)
    verify(database, TABLES)

    assert str(CreateTable(TABLES.message).compile(database)) == before
