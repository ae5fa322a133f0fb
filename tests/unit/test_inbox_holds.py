"""How a job is held, and how failures are told apart."""

from typing import Any, cast

import psycopg
import pytest
from sqlalchemy.exc import IntegrityError, OperationalError

from outbox.inbox.failing import is_database_away
from outbox.inbox.holds import Holds
from outbox.inbox.jobs import Job


def job() -> Job:
    return Job(cast("Any", None))


def test_held_jobs_come_back_in_time_order() -> None:
    holds, early, late, same = Holds(), job(), job(), job()
    holds.add(late, until=3.0)
    holds.add(early, until=1.0)
    holds.add(same, until=1.0)
    assert holds.due(0.9) == []
    assert holds.wait_s(0.5, at_most=9) == 0.5
    assert holds.due(1.0) == [early, same]
    assert holds.wait_s(5.0, at_most=9) == 0.0
    assert holds.due(5.0) == [late]
    assert holds.wait_s(5.0, at_most=9) == 9


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
