"""How a relay turns its batches over: one is settled and the next claimed, ahead of that or with it, and used, or given back."""

import math
import threading
from datetime import UTC, datetime

import pytest
import sqlalchemy as sa

from outbox import clock
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
    """More than ten batches, a few in each partition."""
    return insert(engine, *(f"key-{number % 40}" for number in range(200)))


class Noted(Transactions):
    """Notes of each transaction in which thread it was, what it settled, which partitions it took, and whether ahead."""

    def __init__(self, engine):
        super().__init__(engine, DEFAULT, owner="relay", lease_s=30, batch_size=BATCH, policies=Policies())
        self.ahead, self.taken, self.settled, self.threads, self.done = [], [], [], set(), threading.Event()

    def turn_over(self, last, *, claim=True, ahead=False):
        turned = super().turn_over(last, claim=claim, ahead=ahead)
        self.ahead.append(ahead)
        self.threads.add(threading.current_thread().name)
        self.taken.append(frozenset(turned.batch.leases) if turned.batch else frozenset())
        self.settled.append([] if last is None else [row.id for row in last.batch.rows])
        self.done.set()
        return turned


def run(transactions, publisher, stop, *, ahead_from=BATCH / 2):
    Relay(transactions, publisher, Stopping(stop, grace_s=5), lease_s=30, poll_interval_s=0.05, ahead_from=ahead_from).run()


def stopping_when_empty(engine, stop, judge=lambda _row: CONFIRMED):
    """A publisher in memory that asks the relay to stop when everything was judged."""

    def count(row):
        left.pop()
        if not left:
            stop.set()
        return judge(row)

    left = [None] * 200
    return MemoryPublisher(count)


def leases(engine):
    owned = sa.select(sa.func.count()).select_from(DEFAULT.partition).where(DEFAULT.partition.c.lease_owner.is_not(None))
    with engine.begin() as connection:
        return connection.execute(owned).scalar_one()


def test_while_one_batch_is_published_the_next_is_claimed_from_other_partitions(engine, rows):
    stop, transactions = threading.Event(), Noted(engine)
    publisher = stopping_when_empty(engine, stop)
    run(transactions, publisher, stop)

    assert any(transactions.ahead)
    assert len(transactions.threads) == 2
    for before, after, ahead in zip(transactions.taken, transactions.taken[1:], transactions.ahead[1:], strict=False):
        assert not (ahead and before & after)
    assert sorted(row.message_id for row in publisher.published) == sorted(rows)
    assert (states(engine), leases(engine)) == ([], 0)


def test_what_is_not_claimed_ahead_is_claimed_in_the_transaction_that_settles_the_last_batch(engine, rows):
    stop, transactions = threading.Event(), Noted(engine)
    run(transactions, stopping_when_empty(engine, stop), stop, ahead_from=math.inf)

    assert transactions.settled[0] == []
    assert all(transactions.settled[1:])
    assert all(transactions.taken[:-1]), "and when it has found nothing, the relay does not look at once again"
    assert (states(engine), leases(engine)) == ([], 0)


def test_never_more_than_a_batch_is_published_and_not_settled(engine, rows):
    """So no more than a batch is published twice when the process is killed, whenever that is."""
    stop, transactions, most = threading.Event(), Noted(engine), []

    def judge(_row):
        most.append(len(publisher.published) + 1 - sum(map(len, transactions.settled)))
        return CONFIRMED

    publisher = stopping_when_empty(engine, stop, judge)
    run(transactions, publisher, stop)

    assert max(most) == BATCH


def test_the_order_of_each_key_is_kept(engine, rows):
    stop, transactions = threading.Event(), Noted(engine)
    publisher = stopping_when_empty(engine, stop)
    run(transactions, publisher, stop)

    for key in {row.key for row in publisher.published}:
        own = [row.id for row in publisher.published if row.key == key]
        assert own == sorted(own)


def test_when_it_is_stopped_what_was_claimed_ahead_is_given_back(engine, rows):
    stop, transactions = threading.Event(), Noted(engine)
    publisher = MemoryPublisher(lambda _row: stop.set() or CONFIRMED)
    run(transactions, publisher, stop)

    assert transactions.ahead[:2] == [False, True]
    assert leases(engine) == 0
    assert states(engine) == ["pending"] * (200 - len(publisher.published))


def test_when_the_broker_is_lost_what_was_claimed_ahead_is_given_back_at_once(engine, rows):
    stop, transactions, held = threading.Event(), Noted(engine), []

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
    stop, transactions, held = threading.Event(), Noted(engine), []

    class Going(MemoryPublisher):
        def tick(self):
            if held:
                stop.set()
            elif any(transactions.ahead):
                held.append(leases(engine))
                raise BrokerUnavailable("broker: gone")

        def connect(self):
            if held:
                held.append(leases(engine))

    run(transactions, Going(), stop)

    assert held[0] > 0
    assert held[1] == 0


def test_a_broker_that_asks_to_wait_is_no_time_to_claim(engine, rows):
    stop, transactions = threading.Event(), Noted(engine)

    class Blocking(MemoryPublisher):
        blocked = False

        def publish(self, rows, control):
            self.blocked = True
            stop.set()
            return super().publish(rows, control)

    run(transactions, Blocking(), stop, ahead_from=math.inf)

    assert [bool(taken) for taken in transactions.taken] == [True, False]
    assert leases(engine) == 0


def test_a_database_that_fails_only_ahead_delays_nothing(engine, rows):
    stop = threading.Event()

    class Failing(Noted):
        def turn_over(self, last, *, claim=True, ahead=False):
            if ahead:
                self.ahead.append(True)
                raise sa.exc.OperationalError("claim", {}, Exception("gone"))
            return super().turn_over(last, claim=claim, ahead=ahead)

    transactions = Failing(engine)
    publisher = stopping_when_empty(engine, stop)
    run(transactions, publisher, stop)

    assert True in transactions.ahead
    assert sorted(row.message_id for row in publisher.published) == sorted(rows)


def test_a_transaction_that_fails_is_tried_again_whole(engine, rows):
    """Neither the outcomes nor the next batch are lost."""
    stop = threading.Event()

    class Failing(Noted):
        failures = 0

        def turn_over(self, last, *, claim=True, ahead=False):
            if last is not None and claim and self.failures < 3:
                self.failures += 1
                raise sa.exc.OperationalError("settle", {}, Exception("gone"))
            return super().turn_over(last, claim=claim, ahead=ahead)

    transactions = Failing(engine)
    publisher = stopping_when_empty(engine, stop)
    run(transactions, publisher, stop, ahead_from=math.inf)

    assert transactions.failures == 3
    assert [row.message_id for row in publisher.published].count(rows[0]) == 1
    assert sorted(row.message_id for row in publisher.published) == sorted(rows)
    assert (states(engine), leases(engine)) == ([], 0)


def test_a_small_batch_is_nobodys_reason_to_look_ahead(engine, rows):
    stop, transactions = threading.Event(), Noted(engine)
    run(transactions, stopping_when_empty(engine, stop), stop, ahead_from=math.inf)

    assert not any(transactions.ahead)
    assert len(transactions.threads) == 1


def claim_and_settle(transactions):
    """Return the ids that were claimed, and are sent now."""
    batch = transactions.claim()
    if batch is not None:
        transactions.settle(batch, {row.id: CONFIRMED for row in batch.rows})
    return [row.id for row in batch.rows] if batch is not None else []


@pytest.mark.parametrize("later_s", [0, 1])
def test_what_is_due_is_looked_for_now_and_then_while_claims_find_something_and_at_once_when_they_do_not(
    engine, monkeypatch, later_s
):
    now = clock.seconds()
    monkeypatch.setattr(clock, "seconds", lambda: now)
    transactions = Noted(engine)
    insert(engine, "first")
    assert claim_and_settle(transactions) == [1]
    insert(engine, "due", state="scheduled", available_at=datetime(2026, 1, 1, tzinfo=UTC))
    insert(engine, "second")
    now += later_s
    found = [claim_and_settle(transactions) for _ in range(4)]
    assert found == ([[2, 3], [], [], []] if later_s else [[3], [], [2], []])
