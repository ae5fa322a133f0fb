"""`once`: records a message id in the caller's transaction, and tells whether it was new."""

from __future__ import annotations

from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, overload

from outbox.inbox.errors import Busy, InvalidMessageId, Unfinished
from outbox.inbox.transaction import OpenTransaction
from outbox.reasons import UNSTORABLE
from outbox.store.dialects import insert_into
from outbox.store.leases import standing
from outbox.tables import DEFAULT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from contextlib import AbstractAsyncContextManager, AbstractContextManager
    from typing import TypeAlias

    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
    from sqlalchemy.orm import Session, scoped_session

    from outbox.tables import Tables

    Sync: TypeAlias = Session | scoped_session[Any] | Connection
    Async: TypeAlias = AsyncSession | async_scoped_session[Any] | AsyncConnection

_LONGEST = 255


@overload
def once(target: Sync, consumer: str, message_id: str, *, tables: Tables = DEFAULT) -> AbstractContextManager[bool]: ...
@overload
def once(target: Async, consumer: str, message_id: str, *, tables: Tables = DEFAULT) -> AbstractAsyncContextManager[bool]: ...
def once(target: Any, consumer: str, message_id: str, *, tables: Tables = DEFAULT) -> Any:
    """Record in the caller's transaction that `consumer` handles `message_id`, and tell whether that is new.

        with once(session, "shipping", message_id) as first:      # async with, for an AsyncSession or AsyncConnection
            if first:
                ...                                               # effects, in the same session
        session.commit()                                          # then acknowledge the message

    Guaranteed, once the transaction has committed: of all blocks for one consumer and message id, exactly one that
    committed was `first`. A second block that arrives meanwhile waits until the first transaction ends (bound it with
    `lock_timeout`). Rolled back, also to a savepoint around it, the record is gone and the next delivery is first again.
    Not covered: effects outside this transaction. The message must be acknowledged only after the COMMIT.

    It begins, commits and rolls back nothing; what is pending in a session is flushed neither before nor by it. Under
    REPEATABLE READ and SERIALIZABLE a concurrent duplicate fails with SQLSTATE 40001 instead: retry the transaction.

    Raises at the call `InvalidMessageId` (both names are texts of 1 to 255 characters without NUL); at the start of
    the block `NoTransaction` for a connection outside a transaction or in autocommit; at its end `TransactionAborted`
    when a database error was swallowed inside, so that the COMMIT would silently roll back, and `NoTransaction` when
    the transaction was ended inside. Roll back then, and do not acknowledge. For a message that is handled under a lease
    (see `leased`) and not complete, it raises `Busy` while the lease runs, and `Unfinished` when it is over.
    """
    if hasattr(target, "registry"):  # a scoped session stands for the session of this thread or task
        target = target()
    record = _Record(checked("consumer", consumer), checked("message_id", message_id), tables)
    return _once_async(target, record) if hasattr(target, "run_sync") else _once(target, record)


class _Record:
    def __init__(self, consumer: str, message_id: str, tables: Tables) -> None:
        self._values = {"consumer": consumer, "message_id": message_id}
        self._tables = tables

    def insert(self, target: Session | Connection) -> bool:
        # A look first would see nothing of a transaction that has not committed yet, and both would run.
        self._transaction = OpenTransaction(target, self._tables)
        connection = self._transaction.connection
        processed = self._tables.processed
        statement = insert_into(connection, processed).values(self._values)
        statement = statement.on_conflict_do_nothing().returning(processed.c.message_id)
        # Not rowcount: SQLAlchemy before 2.0.28 loses it for an INSERT, and every message would look like a duplicate.
        if connection.execute(statement).first() is not None:
            return True
        self._refuse_unfinished(connection)
        return False

    def _refuse_unfinished(self, connection: Connection) -> None:
        """Raise if the record is that of a lease: the message is no duplicate before its effect is complete."""
        found = standing(connection, self._tables, **self._values)
        if found is None or found.done:
            return
        if found.left_s:
            raise Busy("a leased handler is at work on the message", retry_after_s=found.left_s)
        raise Unfinished

    def check(self, _target: Session | Connection) -> None:
        self._transaction.check()


@contextmanager
def _once(target: Session | Connection, record: _Record) -> Iterator[bool]:
    yield record.insert(target)
    record.check(target)


@asynccontextmanager
async def _once_async(target: AsyncSession | AsyncConnection, record: _Record) -> AsyncIterator[bool]:
    yield await target.run_sync(record.insert)
    await target.run_sync(record.check)


def checked(name: str, value: object) -> str:
    """Return `value`, or raise `InvalidMessageId` when it cannot be stored as the part of the record that `name` says."""
    if not isinstance(value, str) or not 0 < len(value) <= _LONGEST or UNSTORABLE.search(value):
        raise InvalidMessageId(f"{name} must be a text of 1 to {_LONGEST} characters without NUL, not {value!r:.80}")
    return value
