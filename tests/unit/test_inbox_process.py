"""`Inbox`: which handler gets a message, and what a transaction around it undoes."""

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

import outbox
from outbox import Inbox, Message
from outbox.errors import ConfigurationError, NoTransaction
from outbox.inbox import Result
from outbox.inbox.errors import Busy, InvalidMessageId, NoHandler, UnusableMessage
from outbox.tables import DEFAULT

effects = sa.Table("effects", sa.MetaData(), sa.Column("message_id", sa.Text))
MESSAGE = Message(message_id="m-1", topic="orders.placed", payload=b'{"order": 7}')


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[sa.Engine]:
    engine = sa.create_engine(f"sqlite:///{tmp_path}/app.db", connect_args={"timeout": 0.1})
    outbox.metadata.create_all(engine)
    effects.metadata.create_all(engine)
    yield engine
    engine.dispose()


@pytest.fixture
def inbox(engine: sa.Engine) -> Inbox:
    return Inbox("shipping", sessions=sessionmaker(engine))


def record(session: Session, message: Message) -> None:
    session.execute(effects.insert().values(message_id=message.message_id))


async def record_async(session: AsyncSession, message: Message) -> None:
    await session.execute(effects.insert().values(message_id=message.message_id))


def count(engine: sa.Engine, table: sa.Table = effects) -> int:
    with engine.connect() as connection:
        return connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one()


def test_a_message_is_handled_once(engine: sa.Engine, inbox: Inbox) -> None:
    inbox.transactional("orders.*")(record)
    assert inbox.process(MESSAGE) is Result.HANDLED
    assert inbox.process(MESSAGE) is Result.DUPLICATE
    assert count(engine) == 1


def test_handler_error_undoes_its_effects_and_the_record(engine: sa.Engine, inbox: Inbox) -> None:
    failing = True

    @inbox.transactional("orders.*")
    def handle(session: Session, message: Message) -> None:
        record(session, message)
        if failing:
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        inbox.process(MESSAGE)
    assert count(engine) == count(engine, DEFAULT.processed) == 0
    failing = False
    assert inbox.process(MESSAGE) is Result.HANDLED
    assert count(engine) == 1


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_handler_that_ends_the_transaction_is_an_error(inbox: Inbox, end: str) -> None:
    inbox.transactional("orders.*")(lambda session, _message: getattr(session, end)())
    with pytest.raises(NoTransaction, match="inside"):
        inbox.process(MESSAGE)


def test_the_first_matching_pattern_wins(inbox: Inbox) -> None:
    called: list[str] = []
    inbox.transactional("orders.placed")(lambda _session, _message: called.append("placed"))
    inbox.transactional("orders.*", "refunds.#")(lambda _session, _message: called.append("any"))
    for number, topic in enumerate(["orders.placed", "orders.paid", "refunds.a.b"]):
        inbox.process(Message(message_id=str(number), topic=topic, payload=b""))
    assert called == ["placed", "any", "any"]
    assert inbox.patterns == ("orders.placed", "orders.*", "refunds.#")


def test_topic_without_handler_is_an_error_that_names_it(inbox: Inbox) -> None:
    inbox.transactional("orders.*")(record)
    with pytest.raises(NoHandler, match=r"invoices\.sent"):
        inbox.process(Message(message_id="m", topic="invoices.sent", payload=b""))


def test_message_without_id_is_an_error_that_says_what_to_do(inbox: Inbox) -> None:
    inbox.transactional("orders.*")(record)
    with pytest.raises(UnusableMessage, match="property message_id"):
        inbox.process(Message(message_id="", topic="orders.placed", payload=b""))


def test_message_id_that_cannot_be_stored_is_an_error(inbox: Inbox) -> None:
    inbox.transactional("orders.*")(record)
    with pytest.raises(InvalidMessageId):
        inbox.process(Message(message_id="x" * 256, topic="orders.placed", payload=b""))


def test_locked_database_is_busy(engine: sa.Engine, inbox: Inbox) -> None:
    inbox.transactional("orders.*")(record)
    with engine.connect() as other:
        other.exec_driver_sql("BEGIN IMMEDIATE")
        with pytest.raises(Busy):
            inbox.process(MESSAGE)
    assert inbox.process(MESSAGE) is Result.HANDLED


def test_a_taken_or_malformed_pattern_is_refused(inbox: Inbox) -> None:
    inbox.transactional("orders.*")(record)
    for bad in ("orders.*", "orders..x", "", "a b"):
        with pytest.raises(ConfigurationError):
            inbox.transactional(bad)(record)
    with pytest.raises(ConfigurationError):
        inbox.transactional()


def test_async_handlers_need_an_async_sessionmaker_and_plain_ones_a_plain_one(inbox: Inbox) -> None:
    class Callable:
        async def __call__(self, session: Any, message: Message) -> None: ...

    for handler in (record_async, partial(record_async), Callable()):
        with pytest.raises(ConfigurationError, match="a plain def"):
            inbox.transactional("orders.*")(handler)
    with pytest.raises(ConfigurationError, match="async def"):
        Inbox("shipping", sessions=async_sessionmaker()).transactional("orders.*")(record)


def test_async_inbox(engine: sa.Engine) -> None:
    async def run() -> list[Result]:
        async_engine = create_async_engine(str(engine.url).replace("sqlite:", "sqlite+aiosqlite:"))
        inbox = Inbox("shipping", sessions=async_sessionmaker(async_engine))
        inbox.transactional("orders.*")(record_async)
        try:
            return [await inbox.process_async(MESSAGE) for _ in range(2)]
        finally:
            await inbox.dispose()

    assert asyncio.run(run()) == [Result.HANDLED, Result.DUPLICATE]
    assert count(engine) == 1


def test_json() -> None:
    assert MESSAGE.json() == {"order": 7}
    with pytest.raises(ValueError, match="Expecting value"):
        Message(message_id="m", topic="t", payload=b"<xml>").json()


def test_idempotent_handler_may_find_nothing_to_do(inbox: Inbox) -> None:
    inbox.idempotent("orders.*", because="it does nothing")(lambda _session, _message: None)
    assert inbox.process(MESSAGE) is Result.HANDLED


def test_idempotent_handler_may_leave_everything_to_the_flush(engine: sa.Engine, inbox: Inbox) -> None:
    @inbox.idempotent("orders.*", because="consumers deduplicate")
    def handle(session: Session, _message: Message) -> None:
        outbox.enqueue(session, outbox.Event(topic="orders.seen", payload={}))

    assert inbox.process(MESSAGE) is Result.HANDLED
    assert count(engine, DEFAULT.message) == 1
