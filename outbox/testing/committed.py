"""`assert_committed`: finds the commit that the code under test forgot, also in a session that is rolled back after the test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

from sqlalchemy import event
from sqlalchemy.orm import Session, object_session

from outbox.tables import DEFAULT, MessageRow, Tables
from outbox.targets import session_of
from outbox.testing.events import enqueued
from outbox.testing.reaching import through

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session
    from sqlalchemy.orm import Mapper, SessionTransaction, scoped_session

_UNCOMMITTED = "outbox.uncommitted"


@overload
def assert_committed(session: Session | scoped_session[Any], *, tables: Tables = ...) -> None: ...
@overload
def assert_committed(session: AsyncSession | async_scoped_session[Any], *, tables: Tables = ...) -> Coroutine[Any, Any, None]: ...
def assert_committed(session: Any, *, tables: Tables = DEFAULT) -> Any:
    """Raise `AssertionError` if events were enqueued in the session since its last commit: without one they are never published.

    `session` is that of the code under test. Seen is what was enqueued through the session itself after `outbox.testing` was
    imported, not what went through its connection. To be awaited for an async session.
    """
    plain = session_of(session)

    def check(connection: Connection) -> None:
        noted = plain.info.get(_UNCOMMITTED, set())
        open_ones = [
            f"  {each.topic} key={each.key!r}" for each in enqueued(connection, tables=tables) if each.message_id in noted
        ]
        if open_ones:
            raise AssertionError("\n".join(["enqueued and not committed, so never published; commit the session:", *open_ones]))

    return through(session, tables, check)


@event.listens_for(MessageRow, "after_insert", propagate=True)
def _note(_mapper: Mapper[Any], _connection: Connection, row: MessageRow) -> None:
    session = object_session(row)
    if session is not None:
        session.info.setdefault(_UNCOMMITTED, set()).add(row.message_id)


@event.listens_for(Session, "after_transaction_end")
def _forget(session: Session, transaction: SessionTransaction) -> None:
    if transaction.parent is None:
        session.info.pop(_UNCOMMITTED, None)
