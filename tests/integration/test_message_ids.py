"""Ids that meet: one used twice, in two transactions or two processes, and ids that say another order than the enqueuing."""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock
from uuid import UUID

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from outbox import Event, enqueue, enqueue_many
from outbox.policies import Policies
from outbox.publishers.memory import MemoryPublisher
from outbox.relay import Transactions
from outbox.tables import DEFAULT
from tests.faults import shop
from tests.faults.processes import ROOT
from tests.integration.test_dead import wait_until_blocked
from tests.rows import database, message

ID = UUID("0198c5a7-6b1e-7c3f-8a53-0f5d5f9d2b11")
REUSED = r'unique constraint "outbox_message_message_id_uq"(.|\n)*' + str(ID)
EVENT = Event(topic="orders.placed", payload={}, key="a", message_id=ID)


@pytest.fixture
def engine(database_url: str) -> Iterator[sa.Engine]:
    engine = database(database_url)
    shop.metadata.create_all(engine)
    yield engine
    engine.dispose()


def place(target: Session | sa.Connection, number: str) -> None:
    """Write an order, and the event with the id that others use too."""
    target.execute(sa.insert(shop.order).values(number=number, customer="c"))
    enqueue(target, EVENT)


def orders(engine: sa.Engine) -> list[str]:
    with engine.connect() as connection:
        return sorted(connection.execute(sa.select(shop.order.c.number)).scalars())


def enqueued(engine: sa.Engine) -> list[UUID]:
    with engine.connect() as connection:
        return list(connection.execute(sa.select(message.c.message_id).order_by(message.c.id)).scalars())


@pytest.mark.parametrize("use", [Session, sa.Connection])
def test_an_id_that_is_used_again_fails_the_second_transaction_and_says_which(engine: sa.Engine, use: type) -> None:
    with use(engine) as first, first.begin():
        place(first, "1")
    with pytest.raises(IntegrityError, match=REUSED), use(engine) as second, second.begin():
        place(second, "2")

    assert orders(engine) == ["1"], "an order without its event is not committed"
    assert enqueued(engine) == [ID]


def test_what_swallows_the_error_cannot_commit_a_session_without_the_event(engine: sa.Engine) -> None:
    with engine.begin() as connection:
        enqueue(connection, EVENT)
    with Session(engine) as session:
        place(session, "2")
        with pytest.raises(IntegrityError, match=REUSED):
            session.flush()
        with pytest.raises(sa.exc.PendingRollbackError):
            session.execute(sa.select(1))

    assert orders(engine) == []


@pytest.mark.parametrize(("first_ends", "kept"), [("commit", ["1"]), ("rollback", ["2"])])
def test_of_two_transactions_at_once_with_one_id_exactly_one_commits(engine: sa.Engine, first_ends: str, kept: list[str]) -> None:
    def second() -> None:
        with engine.begin() as connection:
            place(connection, "2")

    with ThreadPoolExecutor(1) as pool, engine.connect() as first:
        place(first, "1")
        waiting = pool.submit(second)
        wait_until_blocked(engine)
        getattr(first, first_ends)()
        error = waiting.exception(30)

    assert (error is None) is (first_ends == "rollback")
    assert error is None or isinstance(error, IntegrityError)
    assert orders(engine) == kept
    assert enqueued(engine) == [ID]


@pytest.mark.parametrize("use", [Session, sa.Connection])
def test_to_a_savepoint_the_error_can_be_undone_and_the_rest_committed(engine: sa.Engine, use: type) -> None:
    with engine.begin() as connection:
        enqueue(connection, EVENT)
    with use(engine) as target, target.begin():
        target.execute(sa.insert(shop.order).values(number="2", customer="c"))
        with pytest.raises(IntegrityError, match=REUSED), target.begin_nested():
            enqueue(target, EVENT)

    assert orders(engine) == ["2"]
    assert enqueued(engine) == [ID]


@pytest.mark.parametrize("use", [Session, sa.Connection])
@pytest.mark.parametrize("at_once", [True, False])
def test_a_key_is_published_as_it_was_enqueued_whatever_its_ids_say(engine: sa.Engine, use: type, at_once: bool) -> None:  # noqa: FBT001
    downwards = [UUID(int=number) for number in range(2000, 0, -1)]
    events = [Event(topic="orders.placed", payload={}, key="a", message_id=each) for each in downwards]
    with use(engine) as target, target.begin():
        if at_once:
            enqueue_many(target, events)
        else:
            for event in events:
                enqueue(target, event)
    assert enqueued(engine) == downwards

    publisher = MemoryPublisher()
    transactions = Transactions(engine, DEFAULT, owner="relay", lease_s=30, batch_size=300, policies=Policies())
    for batch in iter(transactions.claim, None):
        transactions.settle(batch, publisher.publish(batch.rows, Mock()).verdicts)
    assert [row.message_id for row in publisher.published] == downwards


FORKING = """
import os
from outbox.identity import new_message_id

new_message_id()
for _ in range(4):
    if os.fork() == 0:
        os.write(1, new_message_id().bytes)
        os._exit(0)
for _ in range(4):
    os.wait()
"""


def test_processes_that_were_forked_make_ids_of_their_own() -> None:
    """As the workers of a server do that was loaded before it forked. The last 62 bits are chance, and know no time."""
    written = subprocess.run([sys.executable, "-c", FORKING], check=True, capture_output=True, cwd=ROOT).stdout

    assert len({written[start + 8 : start + 16] for start in range(0, 64, 16)}) == 4
