"""The caller's transaction: where it runs, and whether it can still commit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, InvalidRequestError, UnboundExecutionError
from sqlalchemy.orm import Session

from outbox.errors import ConfigurationError, NoTransaction, TransactionAborted
from outbox.transactions import require_connection

if TYPE_CHECKING:
    from outbox.tables import Tables

_NONE = (
    "a message is recorded in the transaction of its effects, and there is none: "
    "the connection has not begun one, or commits every statement by itself (AUTOCOMMIT)"
)
_ENDED = "the transaction was committed or rolled back by the code inside; leave that to whoever began it"
_READ_COMMITTED = {"isolation_level": "READ COMMITTED"}
_IDLE, _INTRANS = 0, 2  # libpq's PQTRANS_IDLE and PQTRANS_INTRANS, which psycopg 2 and 3 report


class OpenTransaction:
    """The transaction that a session or connection is in now. Raises `NoTransaction` when there is none."""

    def __init__(self, target: Session | sa.Connection, tables: Tables) -> None:
        self._target = target
        self.connection = connection_of(target, tables)
        try:
            require_connection(self.connection)
        except NoTransaction as error:
            raise NoTransaction(_NONE) from error
        self._begun = self.connection.get_transaction()
        self._was_idle = _is_idle(self.connection)

    def check(self, *, may_be_empty: bool = False) -> None:
        """Raise `TransactionAborted` if it can no longer commit, `NoTransaction` if somebody has ended it.

        With `may_be_empty` it may also be one in which no statement was executed.
        """
        if isinstance(self._target, Session) and not self._target.is_active:
            raise TransactionAborted
        if self._begun is None or not self._begun.is_active or self._begun is not self.connection.get_transaction():
            raise NoTransaction(_ENDED)
        if may_be_empty and self._is_empty():
            return
        if not _can_commit(self.connection):
            raise TransactionAborted

    def _is_empty(self) -> bool:
        if isinstance(self._target, Session):
            self._target.flush()
        return self._was_idle and _is_idle(self.connection)


def connection_of(target: Session | sa.Connection, tables: Tables, *, own: bool = False) -> sa.Connection:
    """Return the connection that the outbox tables are reached through.

    A session's own `execute` would first flush what is pending, so statements go to its connection. With `own`, for a session
    whose transaction has only just begun and is not the application's: each statement of it sees what has committed before.
    """
    if isinstance(target, sa.Connection):
        return target
    where = {"mapper": sa.inspect(tables.row), "clause": tables.processed}  # for Session(binds=...)
    try:
        # What waits for a lock is to see afterwards what its holder has done, whatever isolation the application works with.
        bind = target.get_bind(**where)
        fresh = own and isinstance(bind, sa.Engine) and bind.dialect.name == "postgresql"
        return target.connection(bind_arguments=where, execution_options=_READ_COMMITTED if fresh else None)
    except UnboundExecutionError as error:
        raise ConfigurationError("the session has binds= for other tables, but not for processed_messages; add it") from error
    except InvalidRequestError as error:  # Session(autobegin=False)
        raise NoTransaction(f"the session has no usable transaction: {error}") from error


def _is_idle(connection: sa.Connection) -> bool:
    """Tell whether nothing has begun in the database yet: drivers wait for the first statement, SQLite's for the first change."""
    driver: Any = connection.connection.driver_connection
    status = getattr(getattr(driver, "info", None), "transaction_status", None)
    return int(status) == _IDLE if status is not None else not getattr(driver, "in_transaction", True)


def _can_commit(connection: sa.Connection) -> bool:
    """Tell whether COMMIT would commit: after a failed statement PostgreSQL rolls back instead, without an error."""
    driver: Any = connection.connection.driver_connection
    status = getattr(getattr(driver, "info", None), "transaction_status", None)
    if status is not None:
        return int(status) == _INTRANS
    if hasattr(driver, "in_transaction"):  # sqlite3, aiosqlite
        return bool(driver.in_transaction)
    try:
        connection.exec_driver_sql("SELECT 1")  # fails in a failed transaction, whatever the driver
    except DBAPIError:
        return False
    return True
