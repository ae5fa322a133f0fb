"""What a relay holds in memory is bounded, in messages and in bytes, however much has gathered."""

from unittest.mock import Mock

import pytest

from outbox.policies import Policies
from outbox.publishers.memory import MemoryPublisher
from outbox.relay import Transactions
from outbox.store import payloads
from outbox.tables import DEFAULT
from tests.integration.test_store_postgres import generate
from tests.rows import database, insert, sqlite_database, states


@pytest.fixture(params=["sqlite", "postgresql"])
def engine(request, tmp_path):
    engine = sqlite_database(tmp_path) if request.param == "sqlite" else database(request.getfixturevalue("database_url"))
    yield engine
    engine.dispose()


def relay(engine, batch_size=1000):
    return Transactions(engine, DEFAULT, owner="relay", lease_s=30, batch_size=batch_size, policies=Policies())


def drain(transactions):
    """Publish until nothing is left; return the batches."""
    batches, publisher = [], MemoryPublisher()
    for batch in iter(transactions.claim, None):
        batches.append(batch.rows)
        transactions.settle(batch, publisher.publish(batch.rows, Mock()).verdicts)
    return batches


def limit(monkeypatch, *, most, small=1000):
    monkeypatch.setattr(payloads, "MOST_BYTES", most)
    monkeypatch.setattr(payloads, "SMALL_BYTES", small)


def test_large_messages_are_claimed_a_few_at_a_time_and_all_in_their_order(engine, monkeypatch):
    limit(monkeypatch, most=100_000)
    keys = [f"key-{number % 10}" for number in range(200)]
    with engine.begin() as connection:
        inserted = [insert(connection, key, payload=bytes([n]) * (10_000 if n % 3 else 10))[0] for n, key in enumerate(keys)]
    batches = drain(relay(engine))

    assert states(engine) == []
    assert max(sum(len(row.payload) for row in rows) for rows in batches) <= 100_000
    rows = [row for batch in batches for row in batch]
    assert {row.message_id: row.payload[:1] for row in rows} == {one: bytes([n]) for n, one in enumerate(inserted)}
    for key in set(keys):
        enqueued = [one for one, its in zip(inserted, keys, strict=True) if its == key]
        assert [row.message_id for row in rows if row.key == key] == enqueued


def test_one_that_is_larger_than_all_may_be_goes_alone(engine, monkeypatch):
    limit(monkeypatch, most=5000)
    small, large, last = (insert(engine, "a", payload=b"x" * size)[0] for size in (1, 9000, 1))
    batches = drain(relay(engine))

    assert [[row.message_id for row in rows] for rows in batches] == [[small], [large], [last]]
    assert [len(rows[0].payload) for rows in batches] == [1, 9000, 1]


def test_an_empty_payload_is_none_of_the_large_ones(engine, monkeypatch):
    limit(monkeypatch, most=5000)
    insert(engine, "a", payload=b"")

    assert [row.payload for rows in drain(relay(engine)) for row in rows] == [b""]


def test_small_messages_are_claimed_as_many_as_the_batch_holds(engine):
    insert(engine, *[None] * 640, partition=3)
    transactions = relay(engine, batch_size=500)

    assert [len(rows) for rows in drain(transactions)] == [500, 140]


def test_a_backlog_after_a_restart_is_promoted_and_claimed_a_batch_at_a_time(database_url):
    engine = database(database_url)
    with engine.begin() as connection:
        generate(connection, 20_000, "'scheduled'", key="NULL", place="n % 64", due="now() - interval '1 hour'")
    transactions = relay(engine)
    batch = transactions.claim()

    assert len(batch.rows) <= 1000
    assert states(engine).count("pending") == 1000
    engine.dispose()
