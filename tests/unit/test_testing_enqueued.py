"""`enqueued`, `assert_enqueued`, `refute_enqueued` and `assert_committed`, in every kind of session and on SQLite."""

import asyncio
from collections.abc import Iterator
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from unittest.mock import ANY
from uuid import UUID, uuid4

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

import outbox
from outbox.testing import assert_committed, assert_enqueued, enqueued, refute_enqueued

PLACED = outbox.Event(topic="orders.placed", payload={"number": 7, "total": Decimal("1.50")}, key="ann", headers={"by": "web"})


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[sa.Engine]:
    engine = sa.create_engine(f"sqlite:///{tmp_path}/shop.db")
    outbox.metadata.create_all(engine)
    yield engine
    engine.dispose()


@pytest.fixture
def session(engine: sa.Engine) -> Iterator[Session]:
    with Session(engine) as session:
        yield session


def test_what_is_asked_for_is_there_before_the_flush_and_the_commit(session: Session) -> None:
    outbox.enqueue(session, PLACED)
    [event] = assert_enqueued(session, topic="orders.placed")
    assert (event.topic, event.key, event.json()["number"], event.state) == ("orders.placed", "ann", 7, "pending")
    session.rollback()
    assert enqueued(session) == []


def test_every_part_can_be_asked_for(session: Session) -> None:
    outbox.enqueue(session, PLACED)
    assert_enqueued(session, topic="orders.placed", key="ann", payload=PLACED.payload, headers={"by": "web"})
    assert_enqueued(session, topic="orders.placed", payload={"number": ANY, "total": "1.50"})
    assert_enqueued(session, topic="orders.placed", payload=PLACED.body)
    for wrong in (
        {"key": "bob"},
        {"key": None},
        {"payload": {"number": 7}},
        {"headers": {"by": "app"}},
        {"headers": {"for": "me"}},
    ):
        refute_enqueued(session, topic="orders.placed", **wrong)
        with pytest.raises(AssertionError):
            assert_enqueued(session, topic="orders.placed", **wrong)


def test_a_key_may_be_given_as_it_was_enqueued(session: Session) -> None:
    number = uuid4()
    outbox.enqueue(session, outbox.Event(topic="a", payload=1, key=str(number)))
    assert_enqueued(session, topic="a", key=number)


def test_failure_lists_what_there_is_and_what_differs(session: Session) -> None:
    outbox.enqueue(session, outbox.Event(topic="orders.paid", payload={"number": 7}, delay=timedelta(hours=1)))
    outbox.enqueue(session, PLACED)
    with pytest.raises(AssertionError) as error:
        assert_enqueued(session, topic="orders.placed", key="bob", payload={"number": 8}, headers={"by": "app"})
    said = """
expected 1 of (topic='orders.placed', key='bob', payload={'number': 8}, headers={'by': 'app'}) in the outbox, found 0; there is:
  orders.placed key='ann' pending headers={'by': 'web'} {"number":7,"total":"1.50"}
    key is 'ann', expected 'bob'; payload is {'number': 7, 'total': '1.50'}, expected {'number': 8}; \
header 'by' is 'web', expected 'app'
  orders.paid key=None scheduled headers={} {"number":7}
    topic is 'orders.paid'; key is None, expected 'bob'; payload is {'number': 7}, expected {'number': 8}; \
header 'by' is 'missing', expected 'app'"""
    assert str(error.value) == said.strip()


def test_failure_where_nothing_is(session: Session) -> None:
    with pytest.raises(AssertionError, match="found 0; there is nothing: was it enqueued here"):
        assert_enqueued(session, topic="orders.placed")


def test_the_number_is_exact(session: Session) -> None:
    outbox.enqueue_many(session, [PLACED, PLACED])
    assert len(assert_enqueued(session, topic="orders.placed", times=2)) == 2
    for times in (1, 3):
        with pytest.raises(AssertionError, match=f"expected {times} of .* found 2"):
            assert_enqueued(session, topic="orders.placed", times=times)
    with pytest.raises(AssertionError, match=r"expected 0 of .* found 2"):
        refute_enqueued(session, topic="orders.placed")


def test_bytes_that_are_no_json(session: Session) -> None:
    outbox.enqueue(session, outbox.Event(topic="scans", payload=b"\x89PNG", content_type="image/png"))
    assert_enqueued(session, topic="scans", payload=b"\x89PNG")
    with pytest.raises(AssertionError, match="payload is not JSON"):
        assert_enqueued(session, topic="scans", payload={})


def test_an_engine_sees_only_what_is_committed(engine: sa.Engine, session: Session) -> None:
    outbox.enqueue(session, PLACED)
    session.flush()
    refute_enqueued(engine, topic="orders.placed")
    session.commit()
    assert_enqueued(engine, topic="orders.placed")


def test_connections_scoped_sessions_and_own_tables(engine: sa.Engine) -> None:
    with engine.begin() as connection:
        outbox.enqueue(connection, PLACED)
        assert_enqueued(connection, topic="orders.placed")
    sessions = scoped_session(sessionmaker(engine))
    assert_enqueued(sessions, topic="orders.placed", tables=outbox.attach(sa.MetaData()))
    sessions.remove()


def test_async_sessions_and_engines(engine: sa.Engine) -> None:
    async def run() -> list[UUID]:
        async_engine = create_async_engine(str(engine.url).replace("sqlite:", "sqlite+aiosqlite:"))
        async with AsyncSession(async_engine) as session:
            outbox.enqueue(session, PLACED)
            found = await assert_enqueued(session, topic="orders.placed", key="ann")
            await refute_enqueued(session, topic="orders.paid")
            with pytest.raises(AssertionError, match="never published"):
                await assert_committed(session)
            await session.commit()
            await assert_committed(session)
        found += await enqueued(async_engine)
        async with async_engine.connect() as connection:
            found += await enqueued(connection, topic="orders.placed")
        await async_engine.dispose()
        return [each.message_id for each in found]

    assert len(asyncio.run(run())) == 3


def test_a_forgotten_commit_is_found(session: Session) -> None:
    assert_committed(session)
    outbox.enqueue(session, PLACED)
    with pytest.raises(AssertionError, match=r"enqueued and not committed.*\n  orders\.placed key='ann'"):
        assert_committed(session)
    session.commit()
    assert_committed(session)


def test_what_was_rolled_back_is_not_missing_a_commit(session: Session) -> None:
    session.connection().exec_driver_sql("BEGIN")
    savepoint = session.begin_nested()
    outbox.enqueue(session, PLACED)
    savepoint.rollback()
    assert_committed(session)
    outbox.enqueue(session, PLACED)
    session.rollback()
    assert_committed(session)


def test_a_commit_within_a_transaction_that_is_rolled_back_counts(engine: sa.Engine) -> None:
    with engine.connect() as connection:
        connection.exec_driver_sql("BEGIN")
        with Session(connection, join_transaction_mode="create_savepoint") as session:
            outbox.enqueue(session, PLACED)
            with pytest.raises(AssertionError):
                assert_committed(session)
            session.commit()
            assert_committed(session)
            assert_enqueued(session, topic="orders.placed")
        connection.rollback()
    refute_enqueued(engine, topic="orders.placed")
