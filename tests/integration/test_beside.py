"""What is done in the database while a batch is published: the last is settled, the next is claimed, used, or given back."""

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

BATCH, CLAIMED = 20, 15


@pytest.fixture
def rows(engine):
    """More than ten batches, a few in each partition."""
    return insert(engine, *(f"key-{number % 40}" for number in range(200)))


class Noted(Transactions):
    """Notes of each transaction in which thread it was, what it settled, which partitions it took, and whether ahead."""

    def __init__(self, engine):
        super().__init__(engine, DEFAULT, owner="relay", lease_s=30, batch_size=CLAIMED, policies=Policies())
        self.ahead, self.taken, self.settled, self.threads, self.done = [], [], [], set(), threading.Event()

    def turn_over(self, last, *, claim=True, ahead=False):
        turned = super().turn_over(last, claim=claim, ahead=ahead)
        self.ahead.append(ahead)
        self.threads.add(threading.current_thread().name)
        self.taken.append(frozenset(turned.batch.leases) if turned.batch else frozenset())
        self.settled.append([] if last is None else [row.id for row in last.batch.rows])
        self.done.set()
        return turned


def run(transactions, publisher, stop, *, ahead_from=CLAIMED / 2, most_unsettled=BATCH):
    stopping = Stopping(stop, grace_s=5)
    options = {"lease_s": 30, "poll_interval_s": 0.05, "ahead_from": ahead_from, "most_unsettled": most_unsettled}
    Relay(transactions, publisher, stopping, **options).run()


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


def test_the_last_batch_is_settled_in_the_transaction_that_claims_the_next(engine, rows):
    stop, transactions = threading.Event(), Noted(engine)
    run(transactions, stopping_when_empty(engine, stop), stop)

    both = [bool(settled and taken) for settled, taken in zip(transactions.settled, transactions.taken, strict=True)]
    assert sum(both) >= len(both) - 4, "but for the first, which settles nothing, and the last, which finds nothing"


def test_never_more_than_a_batch_is_published_and_not_settled(engine, rows):
    """So no more than a batch is published twice when the process is killed, whenever that is."""
    stop, transactions, most = threading.Event(), Noted(engine), []

    def judge(_row):
        settled = sum(map(len, transactions.settled))
        most.append(len(publisher.published) + 1 - settled)
        return CONFIRMED

    publisher = stopping_when_empty(engine, stop, judge)
    run(transactions, publisher, stop)

    assert CLAIMED < max(most) <= BATCH


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


@pytest.mark.parametrize("reason", ["away", "blocked"])
def test_when_nothing_can_be_published_what_was_published_is_settled_at_once(engine, rows, reason):
    """And what was claimed ahead is given back when the broker is away; one that asks to wait may be back in a moment."""
    stop, transactions, left, held = threading.Event(), Noted(engine), [], []

    class Going(MemoryPublisher):
        blocked = False

        def tick(self):
            if left:
                stop.set()
            elif len(self.published) >= CLAIMED:
                left.append(len(states(engine)))
                held.append(leases(engine))
                if reason == "away":
                    raise BrokerUnavailable("broker: gone")
                self.blocked = True

        def connect(self):
            if left:
                left.append(len(states(engine)))
                held.append(leases(engine))

    run(transactions, Going(), stop)

    assert left[:2] == [200, 200 - CLAIMED], "between two publishes one batch is unsettled"
    assert held[0] > held[1]
    assert (held[1] == 0) == (reason == "away")
    assert leases(engine) == 0


@pytest.mark.parametrize("after", [0, 1])
def test_a_database_that_fails_only_beside_a_publish_delays_nothing(engine, rows, after):
    """Be it with a batch to settle or, at the first, with none: what was to be done is done after the publish."""
    stop = threading.Event()

    class Failing(Noted):
        def turn_over(self, last, *, claim=True, ahead=False):
            if ahead and len(self.ahead) > after:
                self.ahead.append(True)
                raise sa.exc.OperationalError("claim", {}, Exception("gone"))
            return super().turn_over(last, claim=claim, ahead=ahead)

    transactions = Failing(engine)
    publisher = stopping_when_empty(engine, stop)
    run(transactions, publisher, stop)

    assert True in transactions.ahead
    published = [row.message_id for row in publisher.published]
    assert sorted(published) == sorted(rows)
    assert states(engine) == []


def test_a_small_batch_is_nobodys_reason_to_look_ahead(engine, rows):
    stop, transactions = threading.Event(), Noted(engine)
    run(transactions, stopping_when_empty(engine, stop), stop, ahead_from=math.inf)

    assert not any(transactions.ahead)
    assert len(transactions.threads) == 1


def test_old_rows_are_not_deleted_while_something_waits_to_be_settled(engine, rows):
    stop, transactions, left = threading.Event(), Noted(engine), []

    class Cleanup:
        due = True

        def turn(self):
            left.append(len(states(engine)) + len(publisher.published))

    publisher = stopping_when_empty(engine, stop)
    stopping = Stopping(stop, grace_s=5)
    options = {"lease_s": 30, "poll_interval_s": 0.05, "ahead_from": 1, "most_unsettled": BATCH}
    Relay(transactions, publisher, stopping, cleanup=Cleanup(), **options).run()

    assert left
    assert set(left) == {200}
