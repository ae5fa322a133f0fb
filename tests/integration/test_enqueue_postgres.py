"""Enqueue on PostgreSQL through psycopg: one statement per event or batch, the database's clock, one transaction."""

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from outbox import Event, NoTransaction, enqueue, enqueue_many
from outbox.tables import DEFAULT

EVENT = Event(topic="orders.placed", payload={"n": 1}, key="7", headers={"a": 1, "b": None, "c": True, "d": "é"})
DELAYED = Event(topic="orders.placed", payload={"n": 2}, delay=timedelta(hours=1, milliseconds=1))


@pytest.fixture
def engine(database_url) -> Iterator[sa.Engine]:
    engine = sa.create_engine(database_url)
    DEFAULT.metadata.create_all(engine)
    yield engine
    engine.dispose()


@pytest.fixture
def statements(engine) -> list[str]:
    """The first words of every statement that was executed."""
    executed: list[str] = []

    @sa.event.listens_for(engine, "before_cursor_execute")
    def _note(connection, cursor, statement, *_) -> None:
        executed.append(" ".join(statement.split()[:3]))

    return executed


def rows(engine) -> list[sa.RowMapping]:
    with engine.connect() as connection:
        return list(connection.execute(sa.select(DEFAULT.message).order_by(DEFAULT.message.c.id)).mappings())


@pytest.mark.parametrize("use", ["session", "connection"])
@pytest.mark.parametrize("event", [EVENT, DELAYED])
def test_one_event_is_one_statement(engine, statements, use, event):
    with Session(engine) as session, session.begin():
        enqueue(session if use == "session" else session.connection(), event)
    assert statements == ["INSERT INTO outbox_message"]


@pytest.mark.parametrize("use", ["session", "connection"])
def test_many_events_are_one_statement_in_their_order(engine, statements, use):
    events = [Event(topic="a", payload=n, key=str(n) if n % 2 else None) for n in range(1200)]
    with Session(engine) as session, session.begin():
        ids = enqueue_many(session if use == "session" else session.connection(), events)
    assert statements == ["INSERT INTO outbox_message"]
    assert [row["message_id"] for row in rows(engine)] == ids


def test_a_row_holds_what_the_event_said(engine):
    with engine.begin() as connection:
        message_id = enqueue(connection, EVENT)
    (row,) = rows(engine)
    assert (row["message_id"], row["payload"], row["headers"]) == (message_id, EVENT.body, EVENT.headers)
    assert (row["state"], row["available_at"]) == ("pending", row["created_at"])


@pytest.mark.parametrize("use", ["session", "connection"])
def test_a_delay_counts_from_the_databases_clock(engine, use):
    moment = datetime(2040, 1, 2, 3, 4, 5, 6, tzinfo=UTC)
    with Session(engine) as session, session.begin():
        target = session if use == "session" else session.connection()
        enqueue_many(target, [DELAYED, DELAYED, Event(topic="a", payload=1, available_at=moment)])
    first, second, dated = rows(engine)
    assert {first["state"], second["state"], dated["state"]} == {"scheduled"}
    assert first["available_at"] - first["created_at"] == second["available_at"] - second["created_at"] == DELAYED.delay
    assert dated["available_at"] == moment


def test_an_event_is_gone_with_its_transaction_or_savepoint(engine):
    with Session(engine) as session:
        enqueue(session, EVENT)
        session.flush()
        session.rollback()
        kept = enqueue(session, EVENT)
        savepoint = session.begin_nested()
        enqueue(session, EVENT)
        enqueue(session.connection(), EVENT)
        savepoint.rollback()
        session.commit()
    assert [row["message_id"] for row in rows(engine)] == [kept]


def test_two_writers_of_one_key_do_not_disturb_each_other(engine):
    with Session(engine) as one, Session(engine) as other:
        enqueue(one, EVENT)
        enqueue(other, EVENT)
        one.flush()
        other.flush()
        other.commit()
        one.commit()
    assert len(rows(engine)) == 2


def test_a_two_phase_transaction_is_accepted(engine):
    with engine.connect() as connection:
        transaction = connection.begin_twophase()
        enqueue(connection, EVENT)
        transaction.rollback()
    assert not rows(engine)


@pytest.mark.parametrize("options", [{"isolation_level": "AUTOCOMMIT"}, {"connect_args": {"autocommit": True}}])
def test_autocommit_is_refused_however_it_was_set(engine, database_url, options):
    own = sa.create_engine(database_url, **options)
    with pytest.raises(NoTransaction, match="AUTOCOMMIT"), Session(own) as session, session.begin():
        enqueue(session, EVENT)
    with own.connect() as connection, connection.begin(), pytest.raises(NoTransaction, match="AUTOCOMMIT"):
        enqueue(connection, EVENT)
    own.dispose()
    assert not rows(engine)


def _in_async(url, use, **options) -> None:
    async def run() -> None:
        engine = create_async_engine(url, **options)
        try:
            await use(engine)
        finally:
            await engine.dispose()

    asyncio.run(run())


def test_async_sessions_and_connections_take_events(engine, database_url):
    async def use(async_engine):
        async with AsyncSession(async_engine) as session, session.begin():
            enqueue(session, EVENT)
            enqueue_many(session, [EVENT, DELAYED])
        async with async_engine.begin() as connection:
            await enqueue(connection, EVENT)
            await enqueue_many(connection, [EVENT, DELAYED])
        async with AsyncSession(async_engine) as session:
            enqueue(session, EVENT)
            await session.flush()
            await session.rollback()

    _in_async(database_url, use)
    assert len(rows(engine)) == 6


@pytest.mark.parametrize("options", [{"isolation_level": "AUTOCOMMIT"}, {"connect_args": {"autocommit": True}}])
def test_async_autocommit_is_refused_however_it_was_set(engine, database_url, options):
    async def in_session(async_engine):
        async with AsyncSession(async_engine) as session:
            enqueue(session, EVENT)
            await session.flush()

    async def in_connection(async_engine):
        async with async_engine.begin() as connection:
            await enqueue(connection, EVENT)

    for use in (in_session, in_connection):
        with pytest.raises(NoTransaction, match="AUTOCOMMIT"):
            _in_async(database_url, use, **options)
    assert not rows(engine)
