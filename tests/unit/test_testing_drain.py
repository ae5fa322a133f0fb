"""`drain` on SQLite: what it publishes, in which order, to whom, and that a rolled back transaction leaves nothing of it."""

import asyncio
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

import outbox
from outbox import Inbox, Message
from outbox.errors import ConfigurationError
from outbox.testing import assert_enqueued, drain, enqueued, refute_enqueued
from tests import bank, rows
from tests.bank import account, deposit


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[sa.Engine]:
    with bank.opened(f"sqlite:///{tmp_path}/bank.db") as engine:
        yield engine


@pytest.fixture
def inbox(engine: sa.Engine) -> Inbox:
    inbox = Inbox("bank", sessions=sessionmaker(engine))
    inbox.transactional("deposits.made")(book)
    return inbox


def book(session: Session, message: Message) -> None:
    deposit(session, message)
    outbox.enqueue(session, outbox.Event(topic="payments.booked", payload=message.json(), key=message.key))


DEPOSIT = outbox.Event(topic="deposits.made", payload={"account": "ann", "amount": 5}, key="ann", headers={"by": "web"})


def balance(target: Any) -> Any:
    return target.execute(sa.select(account.c.balance).where(account.c.name == "ann")).scalar_one()


def test_what_is_published_is_returned_as_consumers_get_it_and_is_gone(engine: sa.Engine) -> None:
    with Session(engine) as session:
        message_id = outbox.enqueue(session, DEPOSIT)
        session.commit()
    headers = {"by": "web", "outbox-topic": "deposits.made", "outbox-key": "ann"}
    payload = b'{"account":"ann","amount":5}'
    assert drain(engine) == [
        Message(str(message_id), "deposits.made", payload, "ann", "deposits.made", "application/json", headers)
    ]
    assert drain(engine) == []
    assert enqueued(engine) == []


def test_the_order_is_that_in_which_they_were_enqueued_whatever_the_keys(engine: sa.Engine) -> None:
    with engine.begin() as connection:
        for number in range(300):
            key = None if number % 3 else f"key-{number % 7}"
            outbox.enqueue(connection, outbox.Event(topic="numbers", payload=number, key=key))
    assert [message.json() for message in drain(engine)] == list(range(300))


def test_more_than_a_batch_is_published_in_the_end(engine: sa.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outbox.testing.draining._BATCH", 5)
    with engine.begin() as connection:
        outbox.enqueue_many(connection, [outbox.Event(topic="numbers", payload=number, key="one") for number in range(50)])
    assert [message.json() for message in drain(engine)] == list(range(50))


def test_only_what_is_deliverable_is_published(engine: sa.Engine) -> None:
    with Session(engine) as session:
        outbox.enqueue(session, outbox.Event(topic="later", payload=1, delay=timedelta(hours=1)))
        outbox.enqueue(session, outbox.Event(topic="now", payload=1))
        session.commit()
        outbox.enqueue(session, outbox.Event(topic="uncommitted", payload=1))
        assert [message.topic for message in drain(engine)] == ["now"]


def test_handlers_get_it_and_what_they_enqueue_follows(engine: sa.Engine, inbox: Inbox) -> None:
    other, seen = Inbox("audit", sessions=sessionmaker(engine)), list[str]()
    other.idempotent("#", because="a test")(lambda _session, message: seen.append(message.topic))
    with Session(engine) as session:
        outbox.enqueue(session, DEPOSIT)
        session.commit()
    assert [message.topic for message in drain(engine, to=[inbox, other])] == ["deposits.made", "payments.booked"]
    assert seen == ["deposits.made", "payments.booked"]
    with engine.connect() as connection:
        assert balance(connection) == 15


def test_what_a_handler_raises_is_raised(engine: sa.Engine, inbox: Inbox) -> None:
    with Session(engine) as session:
        outbox.enqueue(session, outbox.Event(topic="deposits.made", payload={}))
        session.commit()
    with pytest.raises(KeyError, match="account"):
        drain(engine, to=inbox)


def test_handlers_that_never_end_are_an_error(engine: sa.Engine) -> None:
    inbox = Inbox("echo", sessions=sessionmaker(engine))

    @inbox.transactional("#")
    def echo(session: Session, message: Message) -> None:
        outbox.enqueue(session, outbox.Event(topic="again", payload=1))

    with engine.begin() as connection:
        outbox.enqueue(connection, outbox.Event(topic="first", payload=1))
    with pytest.raises(AssertionError, match="more than 20 messages, the last of them again"):
        drain(engine, to=inbox, most=20)


def test_a_partition_that_another_relay_holds_is_an_error_and_not_an_empty_result(engine: sa.Engine) -> None:
    drain(engine)  # makes the partitions
    with engine.begin() as connection:
        outbox.enqueue(connection, DEPOSIT)
        held = {"lease_owner": "relay", "lease_until": sa.func.datetime("now", "+1 hour")}
        connection.execute(rows.partition.update().values(held))
    with pytest.raises(AssertionError, match=r"deposits\.made is pending, but another relay holds its partition"):
        drain(engine)


def test_in_a_session_everything_joins_its_transaction_and_is_rolled_back_with_it(engine: sa.Engine, inbox: Inbox) -> None:
    before = bank.contents(engine)
    kept = dict(inbox.sessions.kw)
    with engine.connect() as connection:
        connection.exec_driver_sql("BEGIN")
        with Session(connection, join_transaction_mode="create_savepoint") as session:
            outbox.enqueue(session, DEPOSIT)
            session.commit()
            assert_enqueued(session, topic="deposits.made")
            assert [message.topic for message in drain(session, to=inbox)] == ["deposits.made", "payments.booked"]
            refute_enqueued(session, topic="deposits.made")
            assert balance(session) == 15
        connection.rollback()
    assert inbox.sessions.kw == kept
    assert bank.contents(engine) == before


def test_in_a_plain_session_nothing_is_committed(engine: sa.Engine, inbox: Inbox) -> None:
    before = bank.contents(engine)
    with Session(engine) as session:
        outbox.enqueue(session, DEPOSIT)
        assert len(drain(session, to=inbox)) == 2
        assert balance(session) == 15
    assert bank.contents(engine) == before


def test_in_a_connection(engine: sa.Engine, inbox: Inbox) -> None:
    with engine.connect() as connection:
        connection.begin()
        outbox.enqueue(connection, DEPOSIT)
        assert len(drain(connection, to=inbox)) == 2
        assert balance(connection) == 15


def test_an_async_inbox(engine: sa.Engine) -> None:
    async_engine = create_async_engine(str(engine.url).replace("sqlite:", "sqlite+aiosqlite:"))
    inbox = Inbox("bank", sessions=async_sessionmaker(async_engine))

    @inbox.transactional("deposits.made")
    async def handle(session: AsyncSession, message: Message) -> None:
        await session.run_sync(book, message)

    with engine.begin() as connection:
        outbox.enqueue(connection, DEPOSIT)
    assert len(drain(engine, to=inbox)) == 2  # from plain code
    with Session(engine) as session, pytest.raises(ConfigurationError, match="AsyncSession"):
        drain(session, to=inbox)

    async def run() -> list[int]:
        async with async_engine.begin() as connection:
            await outbox.enqueue(connection, DEPOSIT)
        published = [len(await drain(async_engine, to=inbox))]
        async with AsyncSession(async_engine) as session:
            outbox.enqueue(session, DEPOSIT)
            published.append(len(await drain(session, to=inbox)))
        await async_engine.dispose()
        return published

    assert asyncio.run(run()) == [2, 2]
    with engine.connect() as connection:
        assert balance(connection) == 20
