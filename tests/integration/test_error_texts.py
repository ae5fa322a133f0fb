"""What a broker or the wire says of a message is written down, whatever is in it: else the error would block the settle."""

import json
from unittest.mock import Mock

import pytest
import sqlalchemy as sa

from outbox import Event, InvalidEvent, enqueue
from outbox.backoff import Backoff
from outbox.policies import Policies
from outbox.publishers.flight import CONFIRMED
from outbox.publishers.memory import MemoryPublisher
from outbox.relay import Transactions
from outbox.relay.settling import storable
from outbox.states import Outcome, RetryPolicy, Verdict
from outbox.tables import DEFAULT
from tests.rows import database, insert, row_of, states, update

BAD = [
    "a\x00b",
    "a\ud800b",
    "\udfff\x00",
    "'; DROP TABLE outbox_message; --",
    "%s %(n)s",
    '{"a": "\\u0000"}',
    "\x1b[31m",
    "č" * 5000,
]


def relay(engine, judge=lambda _row: CONFIRMED):
    policy = RetryPolicy(backoff=Backoff(first_s=3600, ceiling_s=3600, floor=1))
    transactions = Transactions(engine, DEFAULT, owner="relay", lease_s=30, batch_size=1000, policies=Policies(policy))
    publisher = MemoryPublisher(judge)
    for batch in iter(transactions.claim, None):
        transactions.settle(batch, publisher.publish(batch.rows, Mock()).verdicts)
    return publisher.published


@pytest.mark.parametrize("outcome", [Outcome.REJECTED, Outcome.REFUSED, Outcome.UNPUBLISHABLE])
def test_any_reason_can_be_written_down_and_what_waits_behind_it_is_not_lost(engine, outcome):
    pairs = {f"key-{number}": insert(engine, f"key-{number}", f"key-{number}") for number in range(len(BAD))}
    reasons = dict(zip(pairs, BAD, strict=True))
    assert relay(engine, lambda row: Verdict(outcome, reasons[row.key], "Some")) == []

    for key, (first, second) in pairs.items():
        row = row_of(engine, first)
        assert row["last_error"] == storable(reasons[key]) == row["failures"][0]["error"]
        assert row["state"] == ("dead" if outcome is Outcome.UNPUBLISHABLE else "scheduled")
        assert row_of(engine, second)["state"] == "blocked"
        update(engine, first, state="pending", holds=False, dead_at=None)
    published = [row.message_id for row in relay(engine)]
    assert sorted(published) == sorted(one for pair in pairs.values() for one in pair)
    assert all(published.index(first) < published.index(second) for first, second in pairs.values())


def test_a_database_in_another_encoding_gets_its_own_keys_and_texts_back(postgres):
    """Values that are joined go as JSON, whose escapes not every server can take back."""
    name = "in_latin1"
    administrator = sa.create_engine(postgres.url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    with administrator.connect() as connection:
        connection.execute(sa.text(f"CREATE DATABASE {name} TEMPLATE template0 ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C'"))
    engine = database(sa.make_url(postgres.url).set(database=name).render_as_string(hide_password=False))
    first, second = insert(engine, "Jürgen", "Jürgen")
    assert relay(engine, lambda _row: Verdict(Outcome.REJECTED, "für niemanden", "Some")) == []
    third = insert(engine, "Jürgen")[0]
    assert relay(engine) == []

    columns = (DEFAULT.message.c[name] for name in ("message_id", "last_error", "state"))
    with engine.connect() as connection:
        rows = {row.message_id: row for row in connection.execute(sa.select(*columns))}
    assert rows[first].last_error == "für niemanden"
    assert [rows[each].state for each in (first, second, third)] == ["scheduled", "blocked", "blocked"]
    engine.dispose()
    postgres.drop_database(name)


def test_a_payload_with_a_nul_goes_through_as_it_is(engine):
    texts = ["a\x00b", "\x00", "č\u2028"]
    with engine.begin() as connection:
        for text in texts:
            enqueue(connection, Event(topic="orders.placed", payload={"note": text}))
            enqueue(connection, Event(topic="orders.placed", payload=text.encode(), content_type="text/plain"))
    published = sorted(relay(engine), key=lambda row: row.id)

    assert [json.loads(row.payload)["note"] for row in published[::2]] == texts
    assert [row.payload.decode() for row in published[1::2]] == texts


REFUSED = [
    {"key": "a\x00b"},
    {"key": "a\ud800"},
    {"headers": {"h": "a\x00b"}},
    {"headers": {"h": "\udfff"}},
    {"headers": {"h\x00": "a"}},
    {"type": "a\x00b"},
    {"payload": "\ud800"},
]


def test_what_the_database_would_refuse_is_refused_before_it_and_the_transaction_goes_on(engine):
    with engine.begin() as connection:
        for parts in REFUSED:
            with pytest.raises(InvalidEvent):
                enqueue(connection, Event(**{"topic": "orders.placed", "payload": {}} | parts))
        enqueue(connection, Event(topic="orders.placed", payload={}))

    assert states(engine) == ["pending"]
