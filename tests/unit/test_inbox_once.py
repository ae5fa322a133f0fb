"""`once` on SQLite, through every kind of session and connection."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import (
    AsyncEngine,
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session, sessionmaker

import outbox
from outbox.errors import ConfigurationError, NoTransaction, TransactionAborted
from outbox.inbox import once
from outbox.inbox.errors import InvalidMessageId
from outbox.tables import DEFAULT


class Base(DeclarativeBase):
    pass


class Effect(Base):
    __tablename__ = "effect"
    id: Mapped[int] = mapped_column(primary_key=True)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[sa.Engine]:
    engine = sa.create_engine(f"sqlite:///{tmp_path}/app.db", connect_args={"timeout": 0.1})
    outbox.metadata.create_all(engine)
    Base.metadata.create_all(engine)
    yield engine
    engine.dispose()


def recorded(engine: sa.Engine) -> list[tuple[str, str]]:
    with engine.connect() as connection:
        rows = connection.execute(sa.select(DEFAULT.processed.c.consumer, DEFAULT.processed.c.message_id))
        return sorted((row.consumer, row.message_id) for row in rows)


def test_the_second_time_is_not_first(engine: sa.Engine) -> None:
    for expected in (True, False):
        with Session(engine) as session, session.begin(), once(session, "shipping", "m-1") as first:
            assert first is expected
    assert recorded(engine) == [("shipping", "m-1")]


def test_each_consumer_has_its_own_first_time(engine: sa.Engine) -> None:
    with Session(engine) as session, session.begin():
        for consumer in ("shipping", "billing"):
            with once(session, consumer, "m-1") as first:
                assert first
    assert recorded(engine) == [("billing", "m-1"), ("shipping", "m-1")]


def test_rolled_back_it_is_first_again(engine: sa.Engine) -> None:
    with Session(engine) as session:
        with once(session, "shipping", "m-1") as first:
            assert first
        session.rollback()
        with once(session, "shipping", "m-1") as first:
            assert first


def test_rolled_back_to_a_savepoint_it_is_first_again(engine: sa.Engine) -> None:
    with Session(engine) as session, session.begin():
        session.add(Effect(id=1))  # pysqlite begins at the first write only, and a savepoint outside commits
        session.flush()
        savepoint = session.begin_nested()
        with once(session, "shipping", "m-1"):
            pass
        savepoint.rollback()
        with once(session, "shipping", "m-1") as first:
            assert first


def test_nothing_is_committed_by_the_block(engine: sa.Engine) -> None:
    with Session(engine) as session:
        with once(session, "shipping", "m-1"):
            pass
        assert session.in_transaction()
    assert recorded(engine) == []


def test_pending_objects_are_not_flushed(engine: sa.Engine) -> None:
    with Session(engine) as session:
        session.add(Effect(id=1))
        with once(session, "shipping", "m-1"):
            assert len(session.new) == 1


def test_scoped_session(engine: sa.Engine) -> None:
    sessions = scoped_session(sessionmaker(engine))
    with once(sessions, "shipping", "m-1") as first:
        assert first
    sessions.commit()
    sessions.remove()
    assert recorded(engine) == [("shipping", "m-1")]


def test_connection(engine: sa.Engine) -> None:
    with engine.begin() as connection, once(connection, "shipping", "m-1") as first:
        assert first
    assert recorded(engine) == [("shipping", "m-1")]


def test_session_with_binds_finds_the_database_of_the_inbox(engine: sa.Engine) -> None:
    with Session(binds={DEFAULT.processed: engine}) as session, session.begin(), once(session, "shipping", "m-1") as first:
        assert first
    assert recorded(engine) == [("shipping", "m-1")]


def test_session_without_a_bind_for_the_inbox_is_a_configuration_error(engine: sa.Engine) -> None:
    with Session(binds={Effect: engine}) as session, pytest.raises(ConfigurationError, match="processed_messages"):
        once(session, "shipping", "m-1").__enter__()


def test_own_tables(engine: sa.Engine) -> None:
    tables = outbox.attach(sa.MetaData())
    with engine.begin() as connection, once(connection, "shipping", "m-1", tables=tables) as first:
        assert first


def test_connection_outside_a_transaction_is_refused(engine: sa.Engine) -> None:
    with engine.connect() as connection, pytest.raises(NoTransaction):
        once(connection, "shipping", "m-1").__enter__()


def test_session_without_autobegin_is_refused_before_its_begin(engine: sa.Engine) -> None:
    with Session(engine, autobegin=False) as session:
        with pytest.raises(NoTransaction):
            once(session, "shipping", "m-1").__enter__()
        with session.begin(), once(session, "shipping", "m-1") as first:
            assert first


def test_autocommit_is_refused_and_records_nothing(engine: sa.Engine) -> None:
    autocommit = engine.execution_options(isolation_level="AUTOCOMMIT")
    with Session(autocommit) as session, pytest.raises(NoTransaction, match="AUTOCOMMIT"):
        once(session, "shipping", "m-1").__enter__()
    assert recorded(engine) == []


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_ending_the_transaction_inside_is_an_error(engine: sa.Engine, end: str) -> None:
    with Session(engine) as session, pytest.raises(NoTransaction, match="inside"), once(session, "shipping", "m-1"):
        getattr(session, end)()


def test_swallowed_flush_error_is_an_error(engine: sa.Engine) -> None:
    with Session(engine) as session, session.begin():
        session.add(Effect(id=1))
    with Session(engine) as session:
        recording = once(session, "shipping", "m-1")
        recording.__enter__()
        session.add(Effect(id=1))
        with pytest.raises(sa.exc.IntegrityError):
            session.flush()
        with pytest.raises(TransactionAborted):
            recording.__exit__(None, None, None)
    assert recorded(engine) == []


def test_error_inside_passes_unchanged(engine: sa.Engine) -> None:
    with Session(engine) as session, pytest.raises(KeyError, match="mine"), once(session, "shipping", "m-1"):
        raise KeyError("mine")


@pytest.mark.parametrize("bad", ["", "x" * 256, "a\0b", "\ud800", None, 7])
def test_message_id_that_cannot_be_stored_is_refused(engine: sa.Engine, bad: str) -> None:
    with Session(engine) as session:
        with pytest.raises(InvalidMessageId):
            once(session, "shipping", bad)
        with pytest.raises(ValueError, match="consumer"):
            once(session, bad, "m-1")


def test_longest_message_id(engine: sa.Engine) -> None:
    with Session(engine) as session, session.begin(), once(session, "shipping", "ü" * 255) as first:
        assert first


def test_unsupported_database_is_a_configuration_error() -> None:
    engine = sa.create_engine("sqlite://")
    engine.dialect.name = "mysql"
    with engine.begin() as connection, pytest.raises(ConfigurationError, match="mysql"):
        once(connection, "shipping", "m-1").__enter__()
    engine.dispose()


def test_it_needs_no_broker_library_and_no_asyncio() -> None:
    code = "import sys, outbox.inbox; print({'kombu', 'amqp', 'psycopg', 'sqlalchemy.ext.asyncio'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "set()\n"


class TestAsync:
    @pytest.fixture
    def url(self, engine: sa.Engine) -> str:
        return str(engine.url).replace("sqlite://", "sqlite+aiosqlite://")

    async def scenario(self, engine: AsyncEngine) -> AsyncIterator[bool]:
        sessions = async_sessionmaker(engine)
        async with sessions() as session, session.begin(), once(session, "shipping", "m-1") as first:
            yield first
        async with sessions() as session, session.begin(), once(session, "shipping", "m-1") as first:
            yield first
        async with engine.begin() as connection, once(connection, "billing", "m-1") as first:
            yield first
        scoped = async_scoped_session(sessions, scopefunc=lambda: 1)
        async with once(scoped, "mailing", "m-1") as first:
            yield first
        await scoped.commit()
        await scoped.remove()

    def test_every_kind_of_target(self, engine: sa.Engine, url: str) -> None:
        async def run() -> list[bool]:
            async_engine = create_async_engine(url)
            try:
                return [first async for first in self.scenario(async_engine)]
            finally:
                await async_engine.dispose()

        assert asyncio.run(run()) == [True, False, True, True]
        assert [consumer for consumer, _ in recorded(engine)] == ["billing", "mailing", "shipping"]

    def test_ending_the_transaction_inside_is_an_error(self, engine: sa.Engine, url: str) -> None:
        async def run() -> None:
            async_engine = create_async_engine(url)
            try:
                async with AsyncSession(async_engine) as session:
                    with pytest.raises(NoTransaction):
                        async with once(session, "shipping", "m-1"):
                            await session.commit()
            finally:
                await async_engine.dispose()

        asyncio.run(run())
