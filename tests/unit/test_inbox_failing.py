"""What a failure leads to."""

import json
from datetime import timedelta

import psycopg
import pydantic
import pytest
from sqlalchemy.exc import IntegrityError, OperationalError

from outbox.backoff import Backoff
from outbox.errors import ConfigurationError
from outbox.inbox.errors import Busy, Permanent, TimeLimitExceeded
from outbox.inbox.failing import decide, is_not_its_fault
from outbox.inbox.handlers import Rules
from outbox.states import OnDead, RetryPolicy

RETRY = RetryPolicy(max_attempts=3, backoff=Backoff(first_s=2, ceiling_s=60, floor=1.0))


class NotFound(Permanent):
    """No such order."""


def validation_error() -> pydantic.ValidationError:
    with pytest.raises(pydantic.ValidationError) as caught:
        pydantic.TypeAdapter(int).validate_python("seven")
    return caught.value


def json_error() -> json.JSONDecodeError:
    with pytest.raises(json.JSONDecodeError) as caught:
        json.loads("{")
    return caught.value


@pytest.mark.parametrize(("attempts", "delay_s"), [(1, 2.0), (2, 4.0), (3, None), (4, None)])
def test_backs_off_and_gives_up(attempts: int, delay_s: float | None) -> None:
    assert decide(ConnectionError("refused"), attempts=attempts, age_s=0, rules=Rules(retry=RETRY)).delay_s == delay_s


def test_gives_up_what_is_too_old() -> None:
    rules = Rules(retry=RetryPolicy(max_age_s=timedelta(hours=1).total_seconds()))
    assert decide(ConnectionError(), attempts=1, age_s=3599, rules=rules).delay_s is not None
    assert decide(ConnectionError(), attempts=1, age_s=3600, rules=rules).delay_s is None


@pytest.mark.parametrize("error", [NotFound(), validation_error(), json_error(), UnicodeDecodeError("utf-8", b"\xff", 0, 1, "x")])
def test_what_can_never_succeed_is_given_up_at_once(error: Exception) -> None:
    assert decide(error, attempts=1, age_s=0, rules=Rules(retry=RETRY)).delay_s is None


def test_a_handler_says_what_is_permanent_and_what_is_not() -> None:
    rules = Rules(retry=RETRY, permanent=(KeyError,))
    assert decide(KeyError("order"), attempts=1, age_s=0, rules=rules).delay_s is None
    assert decide(ValueError(), attempts=1, age_s=0, rules=rules).delay_s is not None
    rules = Rules(retry=RETRY, retry_on=(OSError,), permanent=(FileNotFoundError,))
    assert decide(TimeoutError(), attempts=1, age_s=0, rules=rules).delay_s is not None
    assert decide(FileNotFoundError(), attempts=1, age_s=0, rules=rules).delay_s is None
    assert decide(ValueError(), attempts=1, age_s=0, rules=rules).delay_s is None
    assert decide(TimeLimitExceeded(), attempts=1, age_s=0, rules=rules).delay_s is not None


def test_the_reason_can_be_stored() -> None:
    failure = decide(ValueError("nul \x00 half \ud800"), attempts=1, age_s=0, rules=Rules())
    assert failure.error == "nul \\x00 half \\ud800"
    assert failure.error_class == "ValueError"
    assert decide(ValueError(), attempts=1, age_s=0, rules=Rules()).error == "ValueError()"


@pytest.mark.parametrize(
    ("error", "innocent"),
    [
        (Busy(), True),
        (OperationalError("", {}, psycopg.errors.DeadlockDetected()), True),
        (OperationalError("", {}, psycopg.errors.SerializationFailure()), True),
        (OperationalError("", {}, psycopg.errors.AdminShutdown()), True),
        (IntegrityError("", {}, psycopg.errors.UniqueViolation()), False),
        (OSError("the handler's own"), False),
    ],
)
def test_what_is_not_the_message_s_fault(error: Exception, *, innocent: bool) -> None:
    assert is_not_its_fault(error) is innocent


def test_what_a_consumer_cannot_do_with_a_dead_key_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="'block' and 'skip'"):
        Rules(retry=RetryPolicy(on_dead=OnDead.PARK))


@pytest.mark.parametrize(
    ("limits", "problem"),
    [
        ({"time_limit_s": 0.0}, "time_limit_s must be .* more than zero, not 0"),
        ({"time_limit_s": float("inf")}, "time_limit_s must be .* not inf"),
        ({"soft_limit_s": 0.0}, "soft_limit_s must be .* more than zero, not 0"),
        ({"lease_s": -1.0}, "lease_s must be .* more than zero, not -1"),
        ({"soft_limit_s": 9.0, "time_limit_s": 8.0}, "soft_limit_s must not be longer than time_limit_s, .*: 9 s > 8 s"),
    ],
)
def test_limits_that_cannot_work_are_refused(limits: dict[str, float], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        Rules(**limits)
