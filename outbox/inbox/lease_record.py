"""The record of one leased message: each method is a short transaction of its own, so none is open during the effect."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy.exc import DBAPIError

from outbox.inbox.busy import busy_on_lock_timeout, sqlstate
from outbox.inbox.errors import Busy
from outbox.inbox.transaction import OpenTransaction, connection_of
from outbox.store import leases
from outbox.store.dialects import limit_waits

if TYPE_CHECKING:
    from collections.abc import Iterator

    import sqlalchemy as sa
    from sqlalchemy.orm import Session

    from outbox.tables import Tables

_STATEMENT_S = 10.0
_LOCK_S = 2.0
_SERIALIZATION_FAILURE = "40001"


@dataclass(frozen=True, slots=True)
class Acquired:
    """The fencing token of a lease that was taken, or, without one, the result of a message that is done."""

    token: int | None
    result: Any = None


class LeaseRecord:
    """What is written down about one message of one consumer.

    With an `async_sessionmaker` its methods are for a greenlet, as `sqlalchemy.util.greenlet_spawn` makes them.
    """

    def __init__(self, sessions: Any, tables: Tables, *, consumer: str, message_id: str, lease_s: float) -> None:
        self.consumer = consumer
        self.message_id = message_id
        self.lease_s = lease_s
        self._sessions = sessions
        self._tables = tables
        self._names = {"consumer": consumer, "message_id": message_id}

    def acquire(self) -> Acquired:
        """Take the lease, or find that the message is done. Raises `Busy` when another worker holds it."""
        with _busy_on_conflict(), busy_on_lock_timeout(), self._transaction() as connection:
            token = leases.acquire(connection, self._tables, **self._names, lease_s=self.lease_s)
            if token is not None:
                return Acquired(token)
            found = leases.standing(connection, self._tables, **self._names)
        if found is None or not found.done:
            raise Busy("another worker holds the lease on the message", retry_after_s=found.left_s if found else None)
        return Acquired(None, found.result)

    def renew(self, token: int) -> bool:
        """Prolong the lease; return whether it was still held."""
        with self._transaction() as connection:
            return leases.renew(connection, self._tables, **self._names, token=token, lease_s=self.lease_s)

    def complete(self, token: int, result: Any) -> bool:
        """Write that the message is done; return whether it is, under this token. Safe to call again when nobody knows."""
        with self._transaction() as connection:
            return self._complete(connection, token, result)

    def complete_in(self, target: Session | sa.Connection, token: int, result: Any) -> bool:
        """Do the same in the caller's transaction. Raises `NoTransaction` when there is none."""
        return self._complete(OpenTransaction(target, self._tables).connection, token, result)

    def is_completed(self, token: int) -> bool:
        """Tell whether it is committed that the message is done, under this token."""
        with self._transaction() as connection:
            return leases.is_completed(connection, self._tables, **self._names, token=token)

    def release(self, token: int) -> None:
        """Let the lease end now, if it is still held."""
        with self._transaction() as connection:
            leases.release(connection, self._tables, **self._names, token=token)

    def _complete(self, connection: sa.Connection, token: int, result: Any) -> bool:
        return leases.complete(connection, self._tables, **self._names, token=token, result=result) or leases.is_completed(
            connection, self._tables, **self._names, token=token
        )

    @contextmanager
    def _transaction(self) -> Iterator[sa.Connection]:
        given = self._sessions()
        with getattr(given, "sync_session", given) as session, session.begin():
            connection = connection_of(session, self._tables)
            limit_waits(connection, statement_s=_STATEMENT_S, lock_s=_LOCK_S)
            yield connection


@contextmanager
def _busy_on_conflict() -> Iterator[None]:
    """Under REPEATABLE READ and SERIALIZABLE a worker that comes second is told so by an error."""
    try:
        yield
    except DBAPIError as error:
        if sqlstate(error) == _SERIALIZATION_FAILURE:
            raise Busy("another worker took the lease on the message at the same moment") from error
        raise
