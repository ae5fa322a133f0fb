"""A batch that is claimed while another is published: it is used, or given back, and its leases are its own."""

import math
import threading

import pytest
import sqlalchemy as sa

from outbox.errors import BrokerUnavailable
from outbox.policies import Policies
from outbox.publishers.base import Published
from outbox.publishers.flight import CONFIRMED, Flight
from outbox.publishers.memory import MemoryPublisher
from outbox.relay import Relay, Transactions
from outbox.relay.stopping import Stopping
from outbox.tables import DEFAULT
from tests.rows import insert, states

BATCH = 16


@pytest.fixture
def rows(engine):
    """More than three batches, a few in each partition."""
    return insert(engine, *(f"key-{number % 40}" for number in range(200)))


class Claims(Transactions):
    """Notes for each claim whether it was made ahead, and which partitions it took."""

    def __init__(self, engine):
        super().__init__(engine, DEFAULT, owner="relay", lease_s=30, batch_size=BATCH, policies=Policies())
        self.ahead, self.taken, self.threads = [], [], set()

    def claim(self, *, ahead=False):
        batch = super().claim(ahead=ahead)
        self.ahead.append(ahead)
        self.threads.add(threading.current_thread().name)
        self.taken.append(frozenset(batch.leases) if batch else frozenset())
        return batch


def run(transactions, publisher, stop, *, ahead_from=BATCH / 2):
    Relay(transactions, publisher, Stopping(stop, grace_s=5), lease_s=30, poll_interval_s=0.05, ahead_from=ahead_from).run()


def stopping_when_empty(engine, stop):
    """A publisher in memory that asks the relay to stop when everything is confirmed."""

    def judge(_row):
        left.pop()
        if not left:
            stop.set()
        return CONFIRMED

    left = [None] * 200
    return MemoryPublisher(judge)


def leases(engine):
    owned = sa.select(sa.func.count()).select_from(DEFAULT.partition).where(DEFAULT.partition.c.lease_owner.is_not(None))
    with engine.begin() as connection:
        return connection.execute(owned).scalar_one()


def test_while_one_batch_is_published_the_next_is_claimed_from_other_partitions(engine, rows):
    stop, transactions = threading.Event(), Claims(engine)
    publisher = stopping_when_empty(engine, stop)
    run(transactions, publisher, stop)

    assert any(transactions.ahead)
    assert len(transactions.threads) == 2
    for before, after, ahead in zip(transactions.taken, transactions.taken[1:], transactions.ahead[1:], strict=False):
        assert not (ahead and before & after)
    assert sorted(row.message_id for row in publisher.published) == sorted(rows)
    assert (states(engine), leases(engine)) == ([], 0)


def test_the_order_of_each_key_is_kept(engine, rows):
    stop, transactions = threading.Event(), Claims(engine)
    publisher = stopping_when_empty(engine, stop)
    run(transactions, publisher, stop)

    for key in {row.key for row in publisher.published}:
        own = [row.id for row in publisher.published if row.key == key]
        assert own == sorted(own)


def test_when_it_is_stopped_what_was_claimed_ahead_is_given_back(engine, rows):
    stop, transactions = threading.Event(), Claims(engine)
    publisher = MemoryPublisher(lambda _row: stop.set() or CONFIRMED)
    run(transactions, publisher, stop)

    assert transactions.ahead == [False, True]
    assert leases(engine) == 0
    assert states(engine) == ["pending"] * (200 - len(publisher.published))


def test_when_the_broker_is_lost_what_was_claimed_ahead_is_given_back_at_once(engine, rows):
    stop, transactions, held = threading.Event(), Claims(engine), []

    class Lost(MemoryPublisher):
        def publish(self, rows, control):
            return Published(Flight(rows).end(), BrokerUnavailable("broker: gone"))

        def connect(self):
            if transactions.ahead:
                held.append(leases(engine))
                stop.set()

    run(transactions, Lost(), stop)

    assert transactions.ahead[:2] == [False, True]
    assert held == [0]
    assert states(engine) == ["pending"] * 200


def test_when_the_broker_goes_between_two_batches_what_was_claimed_ahead_is_given_back(engine, rows):
    stop, transactions, held = threading.Event(), Claims(engine), []

    class Going(MemoryPublisher):
        def tick(self):
            if held:
                stop.set()
            elif transactions.ahead:
                held.append(leases(engine))
                raise BrokerUnavailable("broker: gone")

        def connect(self):
            if held:
                held.append(leases(engine))

    run(transactions, Going(), stop)

    assert held[0] > 0
    assert held[1] == 0


def test_a_database_that_fails_only_ahead_delays_nothing(engine, rows):
    stop = threading.Event()

    class Failing(Claims):
        def claim(self, *, ahead=False):
            if ahead:
                self.ahead.append(True)
                raise sa.exc.OperationalError("claim", {}, Exception("gone"))
            return super().claim()

    transactions = Failing(engine)
    publisher = stopping_when_empty(engine, stop)
    run(transactions, publisher, stop)

    assert True in transactions.ahead
    assert sorted(row.message_id for row in publisher.published) == sorted(rows)


def test_a_small_batch_is_nobodys_reason_to_look_ahead(engine, rows):
    stop, transactions = threading.Event(), Claims(engine)
    run(transactions, stopping_when_empty(engine, stop), stop, ahead_from=math.inf)

    assert not any(transactions.ahead)
