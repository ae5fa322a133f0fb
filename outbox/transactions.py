"""Refuses to enqueue where the event could not commit, or roll back, together with the caller's own rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import event
from sqlalchemy.exc import UnboundExecutionError

from outbox.errors import ConfigurationError, NoTransaction
from outbox.tables import MessageRow
from outbox.waking import enqueued

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine
    from sqlalchemy.orm import Mapper, Session

_AUTOCOMMIT = (
    "every statement commits by itself (AUTOCOMMIT), so the event could be published although the caller's change "
    "was not made; use an engine or connection with another isolation level"
)


def require_session(session: Session, row: type[MessageRow]) -> None:
    """Raise unless `session` can flush a `row` in a transaction, as far as that can be known without I/O.

    What cannot be known yet is checked at the flush: a connection whose driver was switched to autocommit.
    Raises `NoTransaction`, or `ConfigurationError` when the session does not know which database the row goes to.
    """
    if not session.autobegin and not session.in_transaction():
        raise NoTransaction("the session has no transaction and autobegin=False; call session.begin() before enqueue")
    try:
        bind = session.get_bind(mapper=row)
    except UnboundExecutionError as error:
        raise ConfigurationError(
            "the session has binds= for other tables, but not for the outbox; "
            "add **dict.fromkeys(outbox.metadata.sorted_tables, engine) to them, or use Session(bind=engine)"
        ) from error
    if _level(bind) == "AUTOCOMMIT":
        raise NoTransaction(_AUTOCOMMIT)


def require_connection(connection: Connection) -> None:
    """Raise `NoTransaction` unless `connection` is in a transaction, of any kind: plain, two-phase, or with savepoints."""
    if not connection.in_transaction():
        raise NoTransaction(
            "the connection has no transaction; enqueue within `with connection.begin():`, after the caller's own change"
        )
    _refuse_autocommit(connection)


@event.listens_for(MessageRow, "before_insert", propagate=True)
def _at_flush(_mapper: Mapper[Any], connection: Connection, _row: MessageRow) -> None:
    _refuse_autocommit(connection)
    enqueued(connection)


def _refuse_autocommit(connection: Connection) -> None:
    if _level(connection) == "AUTOCOMMIT" or _driver_autocommits(connection):
        raise NoTransaction(_AUTOCOMMIT)


def _level(bind: Engine | Connection) -> str | None:
    """Return the isolation level that was asked for; None when it was left to the driver."""
    asked: str | None = bind.get_execution_options().get("isolation_level")
    # What create_engine(isolation_level=...) was given is kept nowhere else without asking the server.
    return asked or getattr(bind.dialect, "_on_connect_isolation_level", None)


def _driver_autocommits(connection: Connection) -> bool:
    """Tell whether the driver is in autocommit mode, as may be set behind SQLAlchemy's back."""
    driver: Any = connection.connection.driver_connection
    if connection.dialect.name == "sqlite" and driver.isolation_level is None:
        return not driver.in_transaction  # None is also what a "begin" event that emits BEGIN itself needs
    return getattr(connection.connection.dbapi_connection, "autocommit", False) is True
