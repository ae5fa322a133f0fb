"""Waiting for another transaction, bounded: a consumer does not queue up behind a lock, it comes back later."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from sqlalchemy.exc import DBAPIError

from outbox.inbox.errors import Busy
from outbox.inbox.transaction import connection_of
from outbox.store.dialects import set_limits

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy.orm import Session

    from outbox.tables import Tables

_LOCK_NOT_AVAILABLE = "55P03"
_SQLITE_BUSY = 5
_IDLE_MARGIN_S = 5.0  # the consumer itself gives it up first


def bound_waits(session: Session, tables: Tables, *, lock_timeout_s: float | None, idle_s: float | None = None) -> None:
    """Limit, where the database can do so (PostgreSQL), each wait for a lock in the session's transaction, and each pause in it.

    A handler that hangs elsewhere for longer than `idle_s` loses its transaction, and with it the locks that others wait for.
    """
    idle = None if idle_s is None else idle_s + _IDLE_MARGIN_S
    connection = connection_of(session, tables)
    set_limits(connection, lock_timeout=lock_timeout_s, idle_in_transaction_session_timeout=idle)


@contextmanager
def busy_on_lock_timeout() -> Iterator[None]:
    """Turn the database's report of a lock that was not to be had into `Busy`."""
    try:
        yield
    except DBAPIError as error:
        if sqlstate(error) == _LOCK_NOT_AVAILABLE or getattr(error.orig, "sqlite_errorcode", 0) & 0xFF == _SQLITE_BUSY:
            raise Busy("another transaction holds the message, or a lock that its handler needs") from error
        raise


def sqlstate(error: DBAPIError) -> str | None:
    """Return the SQLSTATE of an error, whatever the driver calls it; None when it has none."""
    return getattr(error.orig, "sqlstate", None) or getattr(error.orig, "pgcode", None)
