"""`once` and `Inbox.process` on PostgreSQL: concurrency, lock timeouts, and transactions that can no longer commit."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

import outbox
from outbox import Inbox, Message
from outbox.errors import NoTransaction, TransactionAborted
from outbox.inbox import Result, once
from outbox.inbox.errors import Busy
from outbox.tables import DEFAULT

effects = sa.Table("effects", sa.MetaData(), sa.Column("message_id", sa.Text))
MESSAGE = Message(message_id="m-1", topic="orders.placed", payload=b"{}")
WAIT_S = 20


@pytest.fixture
def engine(database_url: str) -> Iterator[sa.Engine]:
    engine = sa.create_engine(database_url)
    outbox.metadata.create_all(engine)
    effects.metadata.create_all(engine)
    yield engine
    engine.dispose()


def record(session: Session, message: Message) -> None:
    session.execute(effects.insert().values(message_id=message.message_id))


def count(engine: sa.Engine, table: sa.Table = effects) -> int:
    with engine.connect() as connection:
        return connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one()


def wait_until_someone_waits_for_a_lock(engine: sa.Engine) -> None:
    query = sa.text("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'")
    give_up = threading.Timer(WAIT_S, lambda: None)
    give_up.start()
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        while connection.execute(query).scalar_one() == 0:
            assert give_up.is_alive(), "nobody waits"
    give_up.cancel()
    give_up.join()


@pytest.mark.parametrize(("end", "second_is_first"), [("commit", False), ("rollback", True)])
def test_a_concurrent_duplicate_waits_for_the_first(engine: sa.Engine, end: str, *, second_is_first: bool) -> None:
    def second() -> bool:
        with Session(engine) as session, session.begin(), once(session, "shipping", "m-1") as first:
            return first

    with ThreadPoolExecutor(1) as pool, Session(engine) as session:
        with once(session, "shipping", "m-1") as first:
            assert first
            waiting = pool.submit(second)
            wait_until_someone_waits_for_a_lock(engine)
        getattr(session, end)()
        assert waiting.result(WAIT_S) is second_is_first
    assert count(engine, DEFAULT.processed) == 1


def test_a_concurrent_duplicate_under_repeatable_read_fails_to_serialize(engine: sa.Engine) -> None:
    strict = engine.execution_options(isolation_level="REPEATABLE READ")
    with Session(strict) as early, Session(strict) as late:
        late.execute(sa.text("SELECT 1"))  # takes its snapshot
        with once(early, "shipping", "m-1"):
            pass
        early.commit()
        with pytest.raises(OperationalError, match="could not serialize"):
            once(late, "shipping", "m-1").__enter__()


def test_swallowed_database_error_is_an_error(engine: sa.Engine) -> None:
    with engine.connect() as connection, connection.begin():
        recording = once(connection, "shipping", "m-1")
        recording.__enter__()
        with pytest.raises(DBAPIError):
            connection.execute(sa.text("SELECT 1 / 0"))
        with pytest.raises(TransactionAborted):
            recording.__exit__(None, None, None)
    assert count(engine, DEFAULT.processed) == 0


def test_error_undone_to_a_savepoint_is_none(engine: sa.Engine) -> None:
    with (
        Session(engine) as session,
        session.begin(),
        once(session, "shipping", "m-1"),
        pytest.raises(DBAPIError),
        session.begin_nested(),
    ):
        session.execute(sa.text("SELECT 1 / 0"))
    assert count(engine, DEFAULT.processed) == 1


@pytest.mark.parametrize("where", ["engine", "connection", "driver"])
def test_autocommit_is_refused_and_records_nothing(database_url: str, engine: sa.Engine, where: str) -> None:
    level = {"isolation_level": "AUTOCOMMIT"}
    own = sa.create_engine(database_url, **(level if where == "engine" else {}))
    with own.connect().execution_options(**(level if where == "connection" else {})) as connection:
        if where == "driver":
            assert connection.connection.driver_connection is not None
            connection.connection.driver_connection.autocommit = True
        with pytest.raises(NoTransaction), connection.begin():
            once(connection, "shipping", "m-1").__enter__()
    own.dispose()
    assert count(engine, DEFAULT.processed) == 0


def test_tables_in_a_schema(engine: sa.Engine) -> None:
    tables = outbox.attach(sa.MetaData(), schema="messaging")
    with engine.begin() as connection:
        connection.execute(sa.schema.CreateSchema("messaging"))
        tables.metadata.create_all(connection)
    inbox = Inbox("shipping", sessions=sessionmaker(engine), tables=tables)
    inbox.transactional("#")(record)
    assert [inbox.process(MESSAGE), inbox.process(MESSAGE)] == [Result.HANDLED, Result.DUPLICATE]
    assert count(engine, tables.processed) == 1
    assert count(engine, DEFAULT.processed) == 0


def test_handler_that_swallows_a_database_error_undoes_everything(engine: sa.Engine) -> None:
    inbox = Inbox("shipping", sessions=sessionmaker(engine))

    @inbox.transactional("orders.*")
    def handle(session: Session, message: Message) -> None:
        record(session, message)
        with pytest.raises(DBAPIError):
            session.execute(sa.text("SELECT 1 / 0"))

    with pytest.raises(TransactionAborted):
        inbox.process(MESSAGE)
    assert count(engine) == count(engine, DEFAULT.processed) == 0


def test_a_duplicate_of_a_running_message_is_busy_after_the_lock_timeout(engine: sa.Engine) -> None:
    inbox = Inbox("shipping", sessions=sessionmaker(engine), lock_timeout_s=0.05)
    inbox.transactional("orders.*")(record)
    with Session(engine) as session:
        with inbox.once(session, "m-1"):
            pass
        with pytest.raises(Busy):
            inbox.process(MESSAGE)
    assert inbox.process(MESSAGE) is Result.HANDLED


def test_the_lock_timeout_does_not_outlive_the_transaction(engine: sa.Engine) -> None:
    single = sa.create_engine(engine.url, pool_size=1, max_overflow=0)
    inbox = Inbox("shipping", sessions=sessionmaker(single), lock_timeout_s=0.05)
    seen: list[str] = []
    inbox.transactional("#")(lambda session, _message: seen.append(session.scalar(sa.text("SHOW lock_timeout"))))
    inbox.process(MESSAGE)
    with single.connect() as connection:
        seen.append(connection.execute(sa.text("SHOW lock_timeout")).scalar_one())
    single.dispose()
    assert seen == ["50ms", "0"]


def test_async_inbox_with_a_handler_that_swallows(database_url: str, engine: sa.Engine) -> None:
    async def run() -> None:
        inbox = Inbox("shipping", sessions=async_sessionmaker(create_async_engine(database_url)))

        @inbox.transactional("orders.*")
        async def handle(session: AsyncSession, message: Message) -> None:
            await session.execute(effects.insert().values(message_id=message.message_id))
            with pytest.raises(DBAPIError):
                await session.execute(sa.text("SELECT 1 / 0"))

        @inbox.transactional("refunds.*")
        async def handle_refund(session: AsyncSession, message: Message) -> None:
            await session.execute(effects.insert().values(message_id=message.message_id))

        with pytest.raises(TransactionAborted):
            await inbox.process_async(MESSAGE)
        refund = Message(message_id="m-2", topic="refunds.paid", payload=b"")
        assert [await inbox.process_async(refund) for _ in range(2)] == [Result.HANDLED, Result.DUPLICATE]
        await inbox.dispose()

    asyncio.run(run())
    assert count(engine) == count(engine, DEFAULT.processed) == 1
