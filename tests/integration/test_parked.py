"""A parked message follows its head: in what becomes of its key, and in what is kept on record of it."""

from unittest.mock import Mock

import pytest

from outbox.backoff import Backoff
from outbox.policies import Policies
from outbox.publishers.flight import CONFIRMED
from outbox.publishers.memory import MemoryPublisher
from outbox.relay import Transactions, dead
from outbox.states import OnDead, Outcome, RetryPolicy, Verdict
from outbox.store.dead import Selection
from outbox.tables import DEFAULT
from tests.rows import database, insert, row_of, sqlite_database, state_of, update

TOO_LARGE = Verdict(Outcome.UNPUBLISHABLE, "too large", "CannotSerialize")
UNROUTABLE = Verdict(Outcome.REJECTED, "nowhere to go", "Unroutable")
LATER = Backoff(first_s=3600, ceiling_s=3600, floor=1)
POLICIES = Policies(by_topic=tuple((each.value, RetryPolicy(max_attempts=2, backoff=LATER, on_dead=each)) for each in OnDead))
NOT_PARK = [OnDead.BLOCK, OnDead.SKIP]


@pytest.fixture(params=["sqlite", "postgresql"])
def engine(request, tmp_path):
    engine = sqlite_database(tmp_path) if request.param == "sqlite" else database(request.getfixturevalue("database_url"))
    yield engine
    engine.dispose()


def relay(engine, failing=(), verdict=TOO_LARGE):
    """Relay until nothing is pending, and let these messages fail; return the ids of what was published."""
    publisher = MemoryPublisher(lambda row: verdict if row.message_id in failing else CONFIRMED)
    transactions = Transactions(engine, DEFAULT, owner="relay", lease_s=30, batch_size=1000, policies=POLICIES)
    while batch := transactions.claim():
        transactions.settle(batch, publisher.publish(batch.rows, Mock()).verdicts)
    return [row.message_id for row in publisher.published]


def change(engine, what, *message_ids):
    with engine.connect() as connection:
        return sum(what(connection, DEFAULT, Selection(message_ids=message_ids)))


def failures(engine, message_id):
    return [(each["error"], each["error_class"], "at" in each) for each in row_of(engine, message_id)["failures"]]


def parked_behind(head):
    return [(f"parked behind message {head}, which is dead", "Parked", True)]


def test_that_it_was_parked_is_on_record_whichever_way_it_came_to_it(engine):
    first, blocked_before = insert(engine, "a", "a", topic="park")
    relay(engine, [first], UNROUTABLE)
    update(engine, first, available_at=row_of(engine, first)["created_at"])
    relay(engine, [first], UNROUTABLE)
    (came_later,) = insert(engine, "a", topic="park")
    relay(engine)
    other, claimed_with_it = insert(engine, "b", "b", topic="park")
    relay(engine, [other])

    for follower, head in ((blocked_before, first), (came_later, first), (claimed_with_it, other)):
        assert failures(engine, follower) == parked_behind(head)
        assert row_of(engine, follower)["attempts"] == 0


def test_what_was_parked_twice_has_both_on_record(engine):
    first, second = insert(engine, "a", "a", topic="park")
    relay(engine, [first])
    change(engine, dead.retry, second)
    relay(engine)

    assert failures(engine, second) == parked_behind(first) * 2


@pytest.mark.parametrize("its_own", NOT_PARK)
def test_a_parked_message_holds_its_key_whatever_its_own_topic_says(engine, its_own):
    (head,) = insert(engine, "a", topic="park")
    (parked,) = insert(engine, "a", topic=its_own.value)
    relay(engine, [head])
    assert row_of(engine, parked)["holds"] is True
    change(engine, dead.discard, head)
    (late,) = insert(engine, "a", topic=its_own.value)

    assert relay(engine) == []
    assert failures(engine, late) == parked_behind(parked)


@pytest.mark.parametrize("its_own", NOT_PARK)
def test_once_retried_a_parked_message_follows_its_own_policy_again(engine, its_own):
    (head,) = insert(engine, "a", topic="park")
    (parked,) = insert(engine, "a", topic=its_own.value)
    relay(engine, [head])
    change(engine, dead.discard, head)
    change(engine, dead.retry, parked)
    (late,) = insert(engine, "a", topic="park")

    assert relay(engine, [parked]) == ([late] if its_own is OnDead.SKIP else [])
    assert row_of(engine, parked)["error_class"] == "CannotSerialize"
    if its_own is OnDead.BLOCK:
        assert state_of(engine, late).value == "blocked"
