"""Two outboxes in one process, in two schemas or two databases, with the same ids and keys: nothing of one is done to the other."""

from unittest.mock import Mock

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

import outbox
from outbox import Event, Inbox, Message, enqueue
from outbox.inbox import Result
from outbox.migrations import LATEST
from outbox.migrations.sql import apply
from outbox.policies import Policies
from outbox.publishers.memory import MemoryPublisher
from outbox.relay import Transactions
from outbox.relay.cleanup import Cleanup
from outbox.states import OnDead, Outcome, RetryPolicy, Verdict
from outbox.store import pauses
from outbox.store.stats import stats
from outbox.tables import DEFAULT, Tables
from tests.rows import database

TOO_LARGE = Verdict(Outcome.UNPUBLISHABLE, "too large", "CannotSerialize")


class Outbox:
    """One of the two: an engine and its tables."""

    def __init__(self, engine, tables):
        self.engine, self.tables = engine, tables

    def enqueue(self, *keys):
        with self.engine.begin() as connection:
            return [enqueue(connection, Event(topic="orders.placed", payload={}, key=key), tables=self.tables) for key in keys]

    def relay(self, judge=None, **options):
        policies = Policies(RetryPolicy(on_dead=OnDead.PARK))
        transactions = Transactions(
            self.engine, self.tables, owner="relay", lease_s=30, batch_size=100, policies=policies, **options
        )
        publisher = MemoryPublisher(judge) if judge else MemoryPublisher()
        for batch in iter(transactions.claim, None):
            assert transactions.settle(batch, publisher.publish(batch.rows, Mock()).verdicts).fenced == 0
        return [row.message_id for row in publisher.published]

    def everything(self):
        with self.engine.connect() as connection:
            return [connection.execute(sa.select(table).order_by(*table.primary_key)).all() for table in self.tables]

    def stats(self):
        with self.engine.connect() as connection:
            return stats(connection, self.tables)


@pytest.fixture(params=["two schemas", "two databases"])
def both(request, database_url, postgres):
    engine = database(database_url)
    if request.param == "two schemas":
        with engine.begin() as connection:
            connection.execute(sa.text("CREATE SCHEMA other"))
            apply(connection, range(1, LATEST + 1), schema="other")
        yield Outbox(engine, DEFAULT), Outbox(engine, Tables(schema="other"))
        engine.dispose()
        return
    url = postgres.create_database()
    other = database(url)
    yield Outbox(engine, DEFAULT), Outbox(other, DEFAULT)
    engine.dispose()
    other.dispose()
    postgres.drop_database(url)


def test_each_relay_publishes_and_settles_its_own(both):
    one, other = both
    mine, theirs = one.enqueue("a", "b"), other.enqueue("a", "b", "c")
    before = other.everything()

    assert sorted(one.relay()) == sorted(mine)
    assert other.everything() == before
    assert sorted(other.relay()) == sorted(theirs)
    assert (one.stats().published, other.stats().published) == (2, 3)


def test_a_dead_message_holds_and_parks_its_own_key_alone(both):
    one, other = both
    one.enqueue("a", "a")
    assert one.relay(lambda _row: TOO_LARGE) == []
    theirs = other.enqueue("a", "a")
    one.enqueue("a")

    assert one.relay() == []
    assert other.relay() == theirs
    assert (one.stats().messages["dead"], other.stats().messages["dead"]) == (3, 0)


def test_a_pause_and_a_clean_up_are_for_one_alone(both):
    one, other = both
    with one.engine.begin() as connection:
        pauses.add(connection, one.tables, "#")
    one.enqueue("a")
    theirs = other.enqueue("a")
    assert one.relay() == []
    assert other.relay(keep_sent=True) == theirs
    before = other.everything()
    for _ in range(3):
        Cleanup(one.engine, one.tables, retention_s=1e-6, inbox_retention_s=1e-6).turn()

    assert other.everything() == before


def test_each_inbox_knows_its_own_messages(both):
    message = Message(message_id="m", topic="orders.placed", payload=b"{}")
    for outbox_ in both:
        inbox = Inbox("shipping", sessions=sessionmaker(outbox_.engine), tables=outbox_.tables)

        @inbox.transactional("orders.*")
        def ship(session: Session, message: Message, tables=outbox_.tables) -> None:
            outbox.enqueue(session, Event(topic="shipped", payload={}, key=message.message_id), tables=tables)

        assert [inbox.process(message) for _ in range(3)] == [Result.HANDLED, Result.DUPLICATE, Result.DUPLICATE]

    for outbox_ in both:
        assert len(outbox_.relay()) == 1, "and what a handler enqueued is enqueued once, however often the message came"
