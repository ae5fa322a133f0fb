"""While a batch is in flight: nobody else takes it, no transaction is open, and what comes meanwhile disturbs nothing."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import sqlalchemy as sa

from outbox import Event, enqueue
from outbox.backoff import Backoff
from outbox.policies import Policies
from outbox.publishers.base import Published
from outbox.publishers.flight import CONFIRMED, Flight
from outbox.publishers.memory import MemoryPublisher
from outbox.relay import Relay, Transactions
from outbox.relay.stopping import Stopping
from outbox.states import Outcome, RetryPolicy, Verdict
from outbox.tables import DEFAULT
from tests.rows import insert, message, partition, row_of, states, update

REJECTED = Verdict(Outcome.REJECTED, "unroutable", "Unroutable")
PAST = datetime(2020, 1, 1, tzinfo=UTC)


def relay(engine, owner, *, lease_s=30, batch_size=1000):
    policy = RetryPolicy(backoff=Backoff(first_s=3600, ceiling_s=3600, floor=1))
    return Transactions(engine, DEFAULT, owner=owner, lease_s=lease_s, batch_size=batch_size, policies=Policies(policy))


def all_of(batch, verdict=CONFIRMED):
    return {row.id: verdict for row in batch.rows}


def expire_leases(engine):
    with engine.begin() as connection:
        connection.execute(partition.update().where(partition.c.lease_owner.is_not(None)).values(lease_until=PAST))


def test_a_message_that_failed_is_tried_again_by_one_relay_at_a_time(engine):
    """Its time has come, and is past while it is in flight: that alone must not make it anybody's."""
    (message_id,) = insert(engine, "a")
    before, first, second = (relay(engine, name) for name in ("before", "first", "second"))
    batch = before.claim()
    before.settle(batch, all_of(batch, REJECTED))
    update(engine, message_id, available_at=PAST)
    in_flight = first.claim()
    assert [row.message_id for row in in_flight.rows] == [message_id]

    assert second.claim() is None
    assert first.settle(in_flight, all_of(in_flight)).fenced == 0
    assert states(engine) == []


def test_four_relays_try_two_thousand_failed_messages_again_once_each(engine):
    with engine.begin() as connection:
        inserted = insert(connection, *(f"key-{number % 300}" for number in range(2000)))
        connection.execute(message.update().values(state="scheduled", available_at=PAST, attempts=1, last_error="unroutable"))
        connection.execute(message.update().where(message.c.id > 300).values(state="blocked"))
        connection.execute(message.update().values(holds=True))
    barrier, noted, lock = threading.Barrier(4), [], threading.Lock()

    def work(number):
        transactions = relay(engine, f"relay-{number}", batch_size=100)
        barrier.wait(30)
        while states(engine):
            batch = transactions.claim()
            if batch is None:
                continue
            with lock:
                noted.extend(row.message_id for row in batch.rows)
            assert transactions.settle(batch, all_of(batch)).fenced == 0

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))

    assert len(noted) == 2000
    assert set(noted) == set(inserted)


def test_a_relay_that_starts_again_under_its_old_name_is_another_one(engine):
    """The name is for people: whose lease it is, the token says."""
    insert(engine, "a", "b")
    before, after = relay(engine, "web-1"), relay(engine, "web-1")
    lost = before.claim()
    assert after.claim() is None, "the lease of the one that was killed is not its own"
    expire_leases(engine)
    taken_over = after.claim()

    assert before.renew(lost.leases) == set()
    assert before.settle(lost, all_of(lost, REJECTED)).fenced == 2
    assert states(engine) == ["pending", "pending"]
    assert after.settle(taken_over, all_of(taken_over)).fenced == 0
    assert states(engine) == []


def test_what_is_enqueued_for_a_key_in_flight_waits_its_turn_and_takes_nobodys_lease(engine):
    (first,) = insert(engine, "a")
    transactions = relay(engine, "relay")
    batch = transactions.claim()
    with engine.begin() as connection:
        second = enqueue(connection, Event(topic="orders.placed", payload={}, key="a"))
    assert relay(engine, "other").claim() is None

    assert transactions.settle(batch, all_of(batch)).fenced == 0
    following = transactions.claim()
    assert [row.message_id for row in batch.rows] == [first]
    assert [row.message_id for row in following.rows] == [second]


def test_a_crash_at_the_last_attempt_locks_nothing_and_spends_nothing(engine):
    last = RetryPolicy().max_attempts - 1
    (message_id,) = insert(engine, "a", attempts=last, last_error="unroutable")
    relay(engine, "killed").claim()
    expire_leases(engine)
    transactions = relay(engine, "other")
    batch = transactions.claim()
    transactions.settle(batch, all_of(batch, Verdict(Outcome.UNKNOWN)))

    assert (row_of(engine, message_id)["state"], row_of(engine, message_id)["attempts"]) == ("pending", last)
    assert transactions.claim() is not None


class Slow(MemoryPublisher):
    """A broker that takes its time with every message, and calls `meanwhile` before each."""

    def __init__(self, seconds, meanwhile=lambda: None):
        super().__init__()
        self.seconds, self.meanwhile = seconds, meanwhile

    def publish(self, rows, control):
        flight = Flight(rows)
        while flight.waiting and control.may_send():
            row = flight.sent()
            self.meanwhile()
            threading.Event().wait(self.seconds)
            self.published.append(row)
            flight.answered(row, CONFIRMED)
            control.progress()
        return Published(flight.end())


def run_until_empty(engine, *publishers, lease_s):
    stop = threading.Event()

    def run(number, publisher):
        stopping = Stopping(stop, grace_s=0)
        Relay(relay(engine, f"relay-{number}", lease_s=lease_s), publisher, stopping, lease_s=lease_s, poll_interval_s=0.05).run()

    with ThreadPoolExecutor(len(publishers)) as pool:
        running = [pool.submit(run, number, publisher) for number, publisher in enumerate(publishers)]
        while states(engine) and not any(each.done() for each in running):
            threading.Event().wait(0.05)
        stop.set()
        for each in running:
            each.result(30)


def test_a_batch_that_takes_longer_than_the_lease_is_sent_once(engine):
    """Two seconds of work under a lease of half a second, and another relay that looks for what it may take."""
    inserted = insert(engine, *[None] * 40, partition=7)
    slow, other = Slow(0.05), Slow(0.05)
    run_until_empty(engine, slow, other, lease_s=0.5)

    assert sorted(row.message_id for row in slow.published + other.published) == sorted(inserted)


def test_no_transaction_is_open_while_the_broker_takes_its_time(engine):
    """So no limit on idle transactions can end it, and none of ours holds back vacuum."""
    insert(engine, *"abcd")
    ours = sa.text("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'outbox-relay' AND xact_start IS NOT NULL")
    seen = []
    watching = sa.create_engine(engine.url, isolation_level="AUTOCOMMIT", connect_args={"application_name": "watching"})

    def look():
        with watching.connect() as connection:
            seen.append(connection.execute(ours).scalar_one())

    with engine.connect() as connection:
        connection.execute(sa.select(1))
        look()
    assert seen == [1], "it would be seen"
    publisher = Slow(0, look)
    stop = threading.Event()
    publisher.close = stop.set
    limited = engine.execution_options()
    transactions = relay(limited, "relay")
    stopping = Stopping(stop, grace_s=0)
    stopping.wait = lambda _timeout_s: None if states(engine) else stop.set()
    Relay(transactions, publisher, stopping, lease_s=30, poll_interval_s=0.05).run()
    watching.dispose()

    assert seen == [1, 0, 0, 0, 0]
