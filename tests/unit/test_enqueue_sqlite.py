"""An event is enqueued within the caller's transaction, whatever kind of session or connection holds it."""

import asyncio
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session, sessionmaker

import outbox
from outbox import ConfigurationError, Event, InvalidEvent, NoTransaction, enqueue, enqueue_many
from outbox.identity import partition_of
from outbox.tables import DEFAULT, SCHEMA_VERSION


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)


EVENT = Event(topic="orders.placed", payload={"n": 1}, key="7", headers={"a": 1})
LATER = Event(topic="orders.placed", payload={"n": 2}, delay=timedelta(hours=1))


@pytest.fixture
def url(tmp_path) -> str:
    return f"sqlite:///{tmp_path / 'test.db'}"


@pytest.fixture
def engine(url) -> Iterator[sa.Engine]:
    engine = sa.create_engine(url)
    DEFAULT.metadata.create_all(engine)
    Base.metadata.create_all(engine)
    yield engine
    engine.dispose()


@pytest.fixture
def inserts(engine) -> list[str]:
    """The INSERTs into the outbox that were executed."""
    executed: list[str] = []

    @sa.event.listens_for(engine, "before_cursor_execute")
    def _note(connection, cursor, statement, *_) -> None:
        if statement.startswith("INSERT INTO outbox_message"):
            executed.append(statement)

    return executed


def rows(engine) -> list[sa.RowMapping]:
    with engine.connect() as connection:
        return list(connection.execute(sa.select(DEFAULT.message).order_by(DEFAULT.message.c.id)).mappings())


def in_session(engine):
    with Session(engine) as session, session.begin():
        return enqueue(session, EVENT)


def in_scoped_session(engine):
    session = scoped_session(sessionmaker(engine))
    message_id = enqueue(session, EVENT)
    session.commit()
    session.remove()
    return message_id


def in_connection(engine):
    with engine.begin() as connection:
        return enqueue(connection, EVENT)


def in_session_bound_to_connection(engine):
    with engine.begin() as connection, Session(connection, join_transaction_mode="create_savepoint") as session:
        message_id = enqueue(session, EVENT)
        session.commit()
        return message_id


def _in_async(engine, use):
    async def run() -> UUID:
        async_engine = create_async_engine(str(engine.url).replace("sqlite:", "sqlite+aiosqlite:"))
        try:
            return await use(async_engine)
        finally:
            await async_engine.dispose()

    return asyncio.run(run())


def in_async_session(engine):
    async def use(async_engine):
        async with AsyncSession(async_engine) as session, session.begin():
            return enqueue(session, EVENT)

    return _in_async(engine, use)


def in_async_scoped_session(engine):
    async def use(async_engine):
        session = async_scoped_session(async_sessionmaker(async_engine), asyncio.current_task)
        message_id = enqueue(session, EVENT)
        await session.commit()
        await session.remove()
        return message_id

    return _in_async(engine, use)


def in_async_connection(engine):
    async def use(async_engine):
        async with async_engine.begin() as connection:
            return await enqueue(connection, EVENT)

    return _in_async(engine, use)


@pytest.mark.parametrize(
    "use",
    [
        in_session,
        in_scoped_session,
        in_connection,
        in_session_bound_to_connection,
        in_async_session,
        in_async_scoped_session,
        in_async_connection,
    ],
)
def test_every_kind_of_session_and_connection_takes_an_event(engine, use):
    message_id = use(engine)
    (row,) = rows(engine)
    assert row["message_id"] == message_id
    assert (row["topic"], row["key"], row["partition"]) == ("orders.placed", "7", partition_of("7"))
    assert (row["type"], row["content_type"], row["payload"]) == ("orders.placed", "application/json", b'{"n":1}')
    assert (row["headers"], row["state"], row["attempts"]) == ({"a": 1}, "pending", 0)
    assert row["schema_version"] == SCHEMA_VERSION
    assert row["available_at"] == row["created_at"]


def test_enqueue_into_a_session_does_no_io(engine, inserts):
    with Session(engine) as session:
        enqueue(session, EVENT)
        assert not engine.pool.checkedout()
        assert not inserts
        session.flush()
        assert len(inserts) == 1


def test_a_given_message_id_is_kept_and_a_second_use_of_it_fails(engine):
    message_id = UUID("0190163d-8694-739b-aea5-966c26f8ad90")
    event = Event(topic="a", payload=1, message_id=message_id)
    with Session(engine) as session:
        assert enqueue(session, event) == message_id
        session.commit()
    with Session(engine) as session:
        enqueue(session, event)
        with pytest.raises(IntegrityError):
            session.flush()


def test_the_same_event_enqueued_twice_becomes_two_messages(engine):
    with Session(engine) as session:
        assert enqueue(session, EVENT) != enqueue(session, EVENT)
        session.commit()
    assert len(rows(engine)) == 2


def test_events_of_one_flush_are_one_statement_in_their_order(engine, inserts):
    events = [Event(topic="a", payload=n, key=key, headers=headers) for n, key, headers in zip(
        range(4), [None, "1", None, "2"], [None, {"a": 1}, {}, {"b": None}], strict=True
    )]  # fmt: skip
    with Session(engine) as session:
        ids = [enqueue(session, event) for event in events[:2]] + enqueue_many(session, events[2:])
        session.commit()
    assert len(inserts) == 1
    assert [row["message_id"] for row in rows(engine)] == ids


def test_many_events_on_a_connection_are_one_statement_in_their_order(engine, inserts):
    with engine.begin() as connection:
        ids = enqueue_many(connection, (Event(topic="a", payload=n) for n in range(5)))
    assert len(inserts) == 1
    assert [row["message_id"] for row in rows(engine)] == ids
    assert [row["payload"] for row in rows(engine)] == [b"0", b"1", b"2", b"3", b"4"]


def test_nothing_is_written_for_no_events(engine, inserts):
    with engine.begin() as connection:
        assert enqueue_many(connection, []) == []
    assert not inserts


def test_many_delayed_events_on_a_connection_are_one_statement(engine, inserts):
    with engine.begin() as connection:
        enqueue_many(connection, [Event(topic="a", payload=n, delay=timedelta(seconds=n + 1)) for n in range(3)])
    assert len(inserts) == 1
    assert [round((row["available_at"] - row["created_at"]).total_seconds()) for row in rows(engine)] == [1, 2, 3]


@pytest.mark.parametrize("use", ["session", "connection"])
def test_immediate_delayed_and_dated_events_keep_their_order(engine, use):
    moment = datetime(2040, 1, 2, 3, tzinfo=UTC)
    events = [EVENT, LATER, Event(topic="a", payload=3, available_at=moment), LATER, EVENT]
    with Session(engine) as session, session.begin():
        ids = enqueue_many(session if use == "session" else session.connection(), events)
    found = rows(engine)
    assert [row["message_id"] for row in found] == ids
    assert [row["state"] for row in found] == ["pending", "scheduled", "scheduled", "scheduled", "pending"]
    assert [(row["available_at"] - row["created_at"]).total_seconds() for row in found if row["payload"] == b'{"n":2}'] == [
        3600,
        3600,
    ]
    assert found[2]["available_at"] == moment


def test_a_delay_of_zero_is_no_delay(engine):
    with engine.begin() as connection:
        enqueue(connection, Event(topic="a", payload=1, delay=timedelta(0)))
    assert rows(engine)[0]["state"] == "pending"


@outbox.event(topic="orders.placed", key="id")
class Placed:
    id = 7


def test_an_invalid_event_is_an_error_before_anything_is_written(engine, inserts):
    with Session(engine) as session:
        with pytest.raises(InvalidEvent):
            enqueue_many(session, [EVENT, Placed()])
        session.commit()
    assert not inserts


@pytest.mark.parametrize("use", ["session", "connection"])
def test_a_rolled_back_event_is_gone(engine, use):
    with Session(engine) as session:
        enqueue(session if use == "session" else session.connection(), EVENT)
        session.flush()
        session.rollback()
        session.commit()
    assert not rows(engine)


@pytest.mark.parametrize("use", ["session", "connection"])
def test_an_event_of_a_rolled_back_savepoint_is_gone(engine, use):
    with Session(engine) as session, session.begin():
        session.add(Order(id=1))
        session.flush()
        kept = enqueue(session, EVENT)
        savepoint = session.begin_nested()
        enqueue(session if use == "session" else session.connection(), EVENT)
        savepoint.rollback()
    assert [row["message_id"] for row in rows(engine)] == [kept]


def test_a_connection_without_a_transaction_is_refused(engine, inserts):
    with engine.connect() as connection, pytest.raises(NoTransaction, match="no transaction"):
        enqueue(connection, EVENT)
    assert not inserts


def test_a_connection_that_began_by_itself_is_accepted(engine):
    with engine.connect() as connection:
        connection.execute(sa.insert(Order).values(id=1))
        enqueue(connection, EVENT)
        connection.commit()
    assert len(rows(engine)) == 1


def test_an_async_connection_without_a_transaction_is_refused(engine):
    async def use(async_engine):
        async with async_engine.connect() as connection:
            await enqueue(connection, EVENT)

    with pytest.raises(NoTransaction):
        _in_async(engine, use)


def test_a_session_that_must_be_begun_by_hand_and_was_not_is_refused(engine):
    with Session(engine, autobegin=False) as session:
        with pytest.raises(NoTransaction, match=r"session\.begin"):
            enqueue(session, EVENT)
        with session.begin():
            enqueue(session, EVENT)
    assert len(rows(engine)) == 1


@pytest.fixture(params=["create_engine", "execution_options"])
def autocommitting(request, engine, url) -> Iterator[sa.Engine]:
    if request.param == "create_engine":
        own = sa.create_engine(url, isolation_level="AUTOCOMMIT")
    else:
        own = engine.execution_options(isolation_level="AUTOCOMMIT")
    yield own
    own.dispose()


def test_an_engine_in_autocommit_is_refused_at_enqueue(autocommitting, engine):
    with Session(autocommitting) as session, pytest.raises(NoTransaction, match="AUTOCOMMIT"):
        enqueue(session, EVENT)
    with autocommitting.connect() as connection, connection.begin(), pytest.raises(NoTransaction, match="AUTOCOMMIT"):
        enqueue(connection, EVENT)
    assert not rows(engine)


def test_a_session_whose_connection_is_in_autocommit_is_refused_at_the_flush(engine):
    with Session(engine) as session:
        session.connection(execution_options={"isolation_level": "AUTOCOMMIT"})
        enqueue(session, EVENT)
        with pytest.raises(NoTransaction, match="AUTOCOMMIT"):
            session.flush()
    assert not rows(engine)


def test_a_driver_in_autocommit_is_refused_at_the_flush(engine, url):
    own = sa.create_engine(url, connect_args={"isolation_level": None})
    with Session(own) as session:
        enqueue(session, EVENT)
        with pytest.raises(NoTransaction, match="AUTOCOMMIT"):
            session.commit()
    with own.connect() as connection, connection.begin(), pytest.raises(NoTransaction, match="AUTOCOMMIT"):
        enqueue(connection, EVENT)
    own.dispose()
    assert not rows(engine)


def test_an_async_driver_in_autocommit_is_refused(engine):
    async def use(async_engine):
        async with AsyncSession(async_engine.execution_options(isolation_level="AUTOCOMMIT")) as session:
            enqueue(session, EVENT)

    with pytest.raises(NoTransaction, match="AUTOCOMMIT"):
        _in_async(engine, use)


def test_an_application_that_emits_begin_itself_is_accepted(engine, url):
    own = sa.create_engine(url)

    @sa.event.listens_for(own, "connect")
    def _no_implicit_begin(connection, _record) -> None:
        connection.isolation_level = None

    @sa.event.listens_for(own, "begin")
    def _begin(connection) -> None:
        connection.exec_driver_sql("BEGIN")

    with Session(own) as session, session.begin():
        enqueue(session, EVENT)
        enqueue(session.connection(), EVENT)
    own.dispose()
    assert len(rows(engine)) == 2


def test_a_session_without_a_bind_for_the_outbox_says_what_to_add(engine):
    with Session(binds={Base: engine}) as session, pytest.raises(ConfigurationError, match="sorted_tables"):
        enqueue(session, EVENT)
    with Session(binds={Base: engine, **dict.fromkeys(outbox.metadata.sorted_tables, engine)}) as session:  # as it says
        enqueue(session, EVENT)
        session.commit()
    assert len(rows(engine)) == 1


def test_tables_in_the_applications_metadata_keep_their_names_and_take_events(tmp_path):
    metadata = sa.MetaData(naming_convention={"pk": "pk_%(table_name)s", "ix": "ix_%(column_0_name)s"}, schema="app")
    tables = outbox.attach(metadata, schema="messaging")
    engine = sa.create_engine("sqlite://")

    @sa.event.listens_for(engine, "connect")
    def _attach(connection, _record) -> None:
        connection.execute(f"ATTACH '{tmp_path / 'messaging.db'}' AS messaging")

    with engine.begin() as connection:
        metadata.create_all(connection)
        names = {index["name"] for index in sa.inspect(connection).get_indexes("outbox_message", schema="messaging")}
        assert "outbox_message_pending_ix" in names
    with Session(engine) as session, session.begin():
        enqueue(session, EVENT, tables=tables)
        enqueue(session.connection(), LATER, tables=tables)
    engine.dispose()
    with closing(sqlite3.connect(tmp_path / "messaging.db")) as plain:
        assert plain.execute("SELECT count(*) FROM outbox_message").fetchone() == (2,)


@pytest.mark.parametrize("target", [None, "engine", sessionmaker()])
def test_what_is_no_session_and_no_connection_is_a_type_error(target):
    with pytest.raises(TypeError, match="pass the Session or Connection"):
        enqueue(target, EVENT)
