"""The low-water cursor saves the walk past what was published, and overlooks nothing that comes up behind it."""

import pytest
import sqlalchemy as sa

from outbox.backoff import Backoff
from outbox.identity import PARTITIONS
from outbox.policies import Policies
from outbox.publishers.flight import CONFIRMED
from outbox.relay import Transactions, cursor, dead
from outbox.relay.resuming import Resume
from outbox.states import Outcome, RetryPolicy, Verdict
from outbox.store import pauses
from outbox.store.dead import Selection
from outbox.tables import DEFAULT
from tests.rows import insert, message

UNPUBLISHABLE = Verdict(Outcome.UNPUBLISHABLE, "too large")
REJECTED = Verdict(Outcome.REJECTED, "unroutable")


@pytest.fixture(autouse=True)
def looking_all_the_time(monkeypatch):
    monkeypatch.setattr(cursor, "LOOK_EVERY_S", 0.0)


def relay(engine):
    policy = RetryPolicy(backoff=Backoff(first_s=0.0, ceiling_s=0.0))
    return Transactions(engine, DEFAULT, owner="relay", lease_s=30, batch_size=1000, policies=Policies(policy))


def publish(transactions, verdict=CONFIRMED):
    """Publish what there is, once; return the message ids."""
    batch = transactions.claim()
    if batch is None:
        return []
    transactions.settle(batch, {row.id: verdict for row in batch.rows})
    return [row.message_id for row in batch.rows]


def advance(transactions):
    """Let the cursor come as far as it may."""
    for _ in range(3):
        assert transactions.claim() is None


def moved(transactions):
    return max(transactions._cursor.lows)


def test_it_moves_past_what_was_published(engine):
    transactions = relay(engine)
    insert(engine, *"abcdef")
    assert len(publish(transactions)) == 6
    assert moved(transactions) == 0
    advance(transactions)
    assert moved(transactions) == 7


def test_it_waits_for_a_transaction_that_has_its_ids_and_is_not_committed(engine):
    transactions = relay(engine)
    with engine.connect() as late:
        (slow,) = insert(late, "a")
        quick = insert(engine, *"abcdef")
        assert publish(transactions) == quick
        advance(transactions)
        assert moved(transactions) == 0
        late.commit()
    assert publish(transactions) == [slow]
    advance(transactions)
    assert moved(transactions) == 8


def test_it_waits_for_one_that_commits_between_the_search_and_the_look(engine):
    transactions = relay(engine)
    with engine.connect() as late:
        (slow,) = insert(late, "a")
        batch = (insert(engine, "a"), transactions.claim())[1]
        late.commit()
        transactions.settle(batch, {row.id: CONFIRMED for row in batch.rows})
    assert publish(transactions) == [slow]


@pytest.mark.parametrize("what", ["promoted", "unblocked", "retried", "resumed"])
def test_what_becomes_deliverable_again_is_found_behind_it(engine, what):
    transactions = relay(engine)
    first = insert(engine, "a", "a") if what == "unblocked" else insert(engine, "a")
    if what in ("promoted", "unblocked"):
        publish(transactions, REJECTED)
        hold(engine)
    elif what == "retried":
        publish(transactions, UNPUBLISHABLE)
    else:
        with engine.begin() as connection:
            pauses.add(connection, DEFAULT, "orders.placed")
        publish(transactions)
    with engine.begin() as connection:
        connection.execute(message.update().where(message.c.state == "pending").values(topic="orders.other"))
    insert(engine, *(f"key-{number}" for number in range(200)), topic="orders.other")
    while publish(transactions):
        pass
    advance(transactions)
    assert min(low for low in transactions._cursor.lows if low) > 2
    if what in ("promoted", "unblocked"):
        release(engine)
    elif what == "retried":
        with engine.connect() as connection:
            assert sum(dead.retry(connection, DEFAULT, Selection())) == 1
    else:
        resume = Resume(engine, DEFAULT, "orders.placed")
        assert resume.begin()
        assert sum(resume.steps()) == 1
        resume.finish()
    found = [*publish(transactions), *publish(transactions)]
    assert found == first


def test_what_nobody_has_thought_of_is_found_by_the_sweep(engine, monkeypatch):
    transactions = relay(engine)
    insert(engine, *(f"key-{number}" for number in range(10)))
    publish(transactions)
    advance(transactions)
    (lost,) = insert(engine, "a")
    with engine.begin() as connection:
        connection.execute(message.update().values(id=1))
    transactions._cursor.advance(dict.fromkeys(range(PARTITIONS), 5))
    assert publish(transactions) == []
    monkeypatch.setattr(cursor, "SWEEP_EVERY_S", 0.0)
    assert publish(transactions) == [lost]


def hold(engine):
    """Keep what backs off from being due."""
    with engine.begin() as connection:
        connection.execute(message.update().where(message.c.state == "scheduled").values(available_at=sa.text("'2999-01-01'")))


def release(engine):
    """Let it be due."""
    with engine.begin() as connection:
        connection.execute(message.update().where(message.c.state == "scheduled").values(available_at=sa.text("'2020-01-01'")))
