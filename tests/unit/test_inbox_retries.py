"""How failures are held back, counted and logged."""

from typing import Any, cast

import psycopg
import pytest
from sqlalchemy.exc import IntegrityError, OperationalError

from outbox.inbox.link import Delivery
from outbox.inbox.retries import Failures, Holds
from outbox.inbox.settling import is_database_away


def delivery() -> Delivery:
    return Delivery(cast("Any", None), None)


def test_held_deliveries_come_back_in_time_order() -> None:
    holds, early, late, same = Holds(), delivery(), delivery(), delivery()
    holds.add(late, until=3.0)
    holds.add(early, until=1.0)
    holds.add(same, until=1.0)
    assert holds.due(0.9) == []
    assert holds.wait_s(0.5, at_most=9) == 0.5
    assert holds.due(1.0) == [early, same]
    assert holds.wait_s(5.0, at_most=9) == 0.0
    assert holds.due(5.0) == [late]
    assert holds.wait_s(5.0, at_most=9) == 9


def test_failures_are_counted_in_a_row() -> None:
    failures = Failures()
    assert [failures.add("a"), failures.add("b"), failures.add("a")] == [1, 1, 2]
    failures.forget("a")
    failures.forget("unknown")
    assert failures.add("a") == 1


def test_only_so_many_messages_are_remembered() -> None:
    failures = Failures()
    failures.add("first")
    for number in range(10_000):
        failures.add(str(number))
    assert failures.add("first") == 1
    assert failures.add("9999") == 2


@pytest.mark.parametrize(
    ("error", "away"),
    [
        (OperationalError("", {}, psycopg.OperationalError("connection refused")), True),
        (OperationalError("", {}, psycopg.errors.AdminShutdown()), True),
        (OperationalError("", {}, psycopg.errors.CannotConnectNow()), True),
        (OperationalError("", {}, psycopg.errors.TooManyConnections()), True),
        (IntegrityError("", {}, psycopg.errors.UniqueViolation()), False),
        (OperationalError("", {}, psycopg.errors.DeadlockDetected()), False),
        (ConnectionError("the handler's own"), False),
    ],
)
def test_a_database_that_is_away_is_told_from_an_error(error: Exception, *, away: bool) -> None:
    assert is_database_away(error) is away
