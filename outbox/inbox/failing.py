"""What a failure of a handler leads to: told apart by whose fault it was, and decided by one pure function."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from sqlalchemy.exc import DBAPIError, OperationalError

from outbox.errors import OutboxError
from outbox.inbox.busy import sqlstate
from outbox.inbox.errors import Busy, InvalidMessageId, LeaseLost, NoHandler, Permanent, UnusableMessage
from outbox.reasons import storable
from outbox.store.failed import Failure

if TYPE_CHECKING:
    from outbox.inbox.handlers import Rules

EXPLAINED = (InvalidMessageId, NoHandler, UnusableMessage)
"""Errors whose text says it all; a traceback adds nothing."""

_NEVER_BETTER = (Permanent, UnusableMessage, InvalidMessageId, json.JSONDecodeError, UnicodeDecodeError)
_LONGEST_WAIT_S = 60.0
_CONFLICTS = ("40001", "40P01")  # serialization failure, deadlock


def is_not_its_fault(error: BaseException) -> bool:
    """Tell whether an error says nothing about the message: others were at it, or the database is away."""
    return is_contended(error) or is_database_away(error)


def is_contended(error: BaseException) -> bool:
    """Tell whether another worker was in the way: a lock or lease that was not to be had, or was lost, a conflict, a deadlock."""
    return isinstance(error, (Busy, LeaseLost)) or (isinstance(error, DBAPIError) and sqlstate(error) in _CONFLICTS)


def retry_after_s(error: BaseException) -> float:
    """Return after how many seconds a contended message is worth another try: when a lease ends, but no later than in a minute."""
    return min(getattr(error, "retry_after_s", None) or 1.0, _LONGEST_WAIT_S)


def is_database_away(error: BaseException) -> bool:
    """Tell whether an error says that the database is gone, starting, or shutting down, rather than that something is wrong."""
    if not isinstance(error, DBAPIError):
        return False
    state = sqlstate(error)
    if error.connection_invalidated or (state or "").startswith(("08", "57P", "53300")):
        return True
    # a failed connect has no SQLSTATE
    return state is None and isinstance(error, OperationalError) and not hasattr(error.orig, "sqlite_errorcode")


def is_permanent(error: BaseException, rules: Rules) -> bool:
    """Tell whether no further try can help."""
    if isinstance(error, (*_NEVER_BETTER, *_validation_errors(), *rules.permanent)):
        return True
    return bool(rules.retry_on) and not isinstance(error, (*rules.retry_on, OutboxError))  # ours are not the handler's


def decide(error: BaseException, *, attempts: int, age_s: float, rules: Rules) -> Failure:
    """Decide what follows a failure of a message that has been tried `attempts` times, and is `age_s` seconds old."""
    policy = rules.retry
    too_old = policy.max_age_s is not None and age_s >= policy.max_age_s
    over = attempts >= policy.max_attempts or too_old or is_permanent(error, rules)
    delay_s = None if over else policy.backoff.delay_s(attempts)
    return Failure(error=storable(f"{error}" or repr(error)), error_class=type(error).__name__, delay_s=delay_s)


def _validation_errors() -> tuple[type[BaseException], ...]:
    pydantic = sys.modules.get("pydantic_core")  # nobody raises its errors who has not imported it
    return (pydantic.ValidationError,) if pydantic is not None else ()
