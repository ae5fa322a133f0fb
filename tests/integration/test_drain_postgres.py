"""`drain` on PostgreSQL, within a transaction that is rolled back."""

import asyncio
from collections.abc import Iterator

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

import outbox
from outbox import Inbox, Message
from outbox.testing import assert_committed, drain, enqueued
from tests import bank

DEPOSIT = outbox.Event(topic="deposits.made", payload={"account": "ann", "amount": 5}, key="ann")
LIMITS = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout")


@pytest.fixture
def engine(database_url: str) -> Iterator[sa.Engine]:
    with bank.opened(database_url) as engine:
        yield engine


def limits(session: Session) -> list[str]:
    return [session.scalar(sa.text(f"SHOW {name}")) for name in LIMITS]


def test_the_transaction_of_the_test_keeps_its_own_limits_and_its_rollback(engine: sa.Engine) -> None:
    before = bank.contents(engine)
    inbox = Inbox("bank", sessions=sessionmaker(engine))
    inbox.transactional("deposits.made")(bank.deposit)
    with engine.connect() as connection, connection.begin() as transaction:
        with Session(connection, join_transaction_mode="create_savepoint") as session:
            usual = limits(session)
            outbox.enqueue(session, DEPOSIT)
            session.commit()
            assert_committed(session)
            assert len(drain(session, to=inbox)) == 1
            assert limits(session) == usual
            session.commit()
            assert enqueued(session) == []
        transaction.rollback()
    assert bank.contents(engine) == before


def test_an_async_session_and_inbox(engine: sa.Engine) -> None:
    before = bank.contents(engine)

    async def run() -> int:
        async_engine = create_async_engine(engine.url)
        inbox = Inbox("bank", sessions=async_sessionmaker(async_engine))

        @inbox.transactional("deposits.made")
        async def handle(session: AsyncSession, message: Message) -> None:
            await session.run_sync(bank.deposit, message)

        async with async_engine.connect() as connection, connection.begin() as transaction:
            async with AsyncSession(connection, join_transaction_mode="create_savepoint") as session:
                outbox.enqueue(session, DEPOSIT)
                await session.commit()
                assert len(await drain(session, to=inbox)) == 1
                balance = (
                    (await session.execute(sa.select(bank.account.c.balance).order_by(bank.account.c.name))).scalars().first()
                )
                await session.commit()
            await transaction.rollback()
        await async_engine.dispose()
        return balance or 0

    assert asyncio.run(run()) == 15
    assert bank.contents(engine) == before
