"""Everybody at work on the same tables: applications, relays, cleaners and operators; PostgreSQL sees no deadlock."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from unittest.mock import Mock

import pytest
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.exc import DBAPIError

from outbox import Event, enqueue_many
from outbox.backoff import Backoff
from outbox.policies import Policies
from outbox.publishers.flight import CONFIRMED
from outbox.publishers.memory import MemoryPublisher
from outbox.relay import Transactions, dead
from outbox.relay.cleanup import Cleanup
from outbox.relay.resuming import Resume
from outbox.states import OnDead, Outcome, RetryPolicy, Verdict
from outbox.store import pauses
from outbox.store.dead import Selection
from outbox.tables import DEFAULT
from tests.rows import database, message, states

KEYS = [f"key-{number}" for number in range(30)]
TOPICS = [each.value for each in OnDead]
POLICIES = Policies(
    by_topic=tuple(
        (each.value, RetryPolicy(max_attempts=2, backoff=Backoff(first_s=0, ceiling_s=0), on_dead=each)) for each in OnDead
    )
)
FAILURES = [
    Verdict(Outcome.REJECTED, "unroutable", "Unroutable"),
    Verdict(Outcome.REFUSED, "nack", "Nack"),
    Verdict(Outcome.UNPUBLISHABLE, "too large", "CannotSerialize"),
]


# Between two rows of one statement there is time for others: what takes its locks in a bad order is found within seconds.
SLOWER = """
CREATE FUNCTION dawdle() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_sleep(random() * {seconds});
    RETURN coalesce(NEW, OLD);
END $$;
CREATE TRIGGER dawdle BEFORE UPDATE ON outbox_partition FOR EACH ROW EXECUTE FUNCTION dawdle();
CREATE TRIGGER dawdle BEFORE UPDATE OR DELETE ON outbox_message FOR EACH ROW EXECUTE FUNCTION dawdle();
"""


@pytest.fixture
def engine(database_url):
    engine = database(database_url)
    with engine.begin() as connection:
        connection.exec_driver_sql(SLOWER.format(seconds=0.001))
    yield engine
    engine.dispose()


class Everybody:
    """Who works, and what was committed and published; `errors` are all that PostgreSQL has complained of."""

    def __init__(self, engine):
        self.engine, self.stop, self.calm = engine, threading.Event(), threading.Event()
        self.committed, self.published, self.errors = [], [], []
        event.listen(engine, "handle_error", lambda context: self.errors.append(str(context.original_exception)))

    def enqueue(self, number, rounds):
        """Enqueue many at once, over all keys, each time in another order; every third time in vain."""
        chance = random.Random(number)
        for turn in range(rounds):
            keys = chance.sample([*KEYS, None], len(KEYS))
            with self.engine.connect() as connection:
                events = [Event(topic=chance.choice(TOPICS), payload={}, key=key) for key in keys]
                connection.begin()
                ids = enqueue_many(connection, events)
                if turn % 3 == 2:
                    connection.rollback()
                else:
                    connection.commit()
                    self.committed += ids

    def relay(self, number):
        chance = random.Random(number)
        transactions = Transactions(
            self.engine, DEFAULT, owner=f"relay-{number}", lease_s=30, batch_size=80, policies=POLICIES, keep_sent=True
        )

        def judge(_row):
            return CONFIRMED if self.calm.is_set() or chance.random() < 0.9 else chance.choice(FAILURES)

        while not self.stop.is_set():
            batch = transactions.claim()
            if batch is None:
                self.stop.wait(0.01)
                continue
            publisher = MemoryPublisher(judge)
            settled = transactions.settle(batch, publisher.publish(batch.rows, Mock()).verdicts)
            assert settled.fenced == 0
            self.published += [row.message_id for row in publisher.published]

    def clean(self):
        clock = count(0, 100)
        clean_up = Cleanup(self.engine, DEFAULT, retention_s=1e-6, inbox_retention_s=1e-6, clock=lambda: float(next(clock)))
        while not self.stop.is_set():
            clean_up.turn()

    def retry(self, key):
        while not self.stop.is_set():
            with self.engine.connect() as connection:
                list(dead.retry(connection, DEFAULT, Selection(key=key)))

    def pause_and_resume(self, topic):
        while not self.stop.is_set():
            with self.engine.begin() as connection:
                pauses.add(connection, DEFAULT, topic)
            resume = Resume(self.engine, DEFAULT, topic)
            if resume.begin():
                list(resume.steps())
                resume.finish()

    def deadlocks(self):
        with self.engine.connect() as connection:
            connection.execute(sa.text("SELECT pg_stat_force_next_flush()") if _has_flush(connection) else sa.select(1))
            query = sa.text("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")
            return connection.execute(query).scalar_one()


def _has_flush(connection):
    return connection.execute(sa.text("SELECT to_regproc('pg_stat_force_next_flush') IS NOT NULL")).scalar_one()


def test_four_relays_their_cleaners_bulk_writers_and_operators_meet_in_no_deadlock(engine):
    everybody = Everybody(engine)
    with ThreadPoolExecutor(16) as pool:
        writers = [pool.submit(everybody.enqueue, number, 8) for number in range(3)]
        others = [
            *(pool.submit(everybody.relay, number) for number in range(4)),
            *(pool.submit(everybody.clean) for _ in range(4)),
            *(pool.submit(everybody.retry, key) for key in (None, KEYS[0])),
            *(pool.submit(everybody.pause_and_resume, topic) for topic in ("skip", "#")),
        ]
        try:
            for writer in writers:
                writer.result(60)
            everybody.calm.set()
            _wait(lambda: states(engine) == [] or any(each.done() for each in others))
        finally:
            everybody.stop.set()
        for each in others:
            each.result(60)

    assert everybody.errors == []
    assert everybody.deadlocks() == 0
    assert states(engine) == []
    assert sorted(everybody.published) == sorted(everybody.committed), "each once, although all kinds of failures came between"


def _wait(condition):
    pause = threading.Event()
    for _ in range(3000):
        if condition():
            return
        pause.wait(0.02)
    raise AssertionError("it never came to an end")


def test_a_deadlock_would_be_seen(engine):
    """Two applications that write rows of each other in opposite orders: the trial above must not be blind."""
    everybody = Everybody(engine)
    with engine.begin() as connection:
        enqueue_many(connection, [Event(topic="skip", payload={}) for _ in range(2)])
    barrier = threading.Barrier(2)

    def touch(first, second):
        try:
            with engine.begin() as connection:
                for place, each in enumerate((first, second)):
                    connection.execute(message.update().where(message.c.id == each).values(attempts=place))
                    if place == 0:
                        barrier.wait(30)
        except DBAPIError:
            pass

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(touch, (1, 2), (2, 1)))

    assert any("deadlock detected" in each for each in everybody.errors)
