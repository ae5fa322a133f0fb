"""Lets a relay and inboxes work where a test is: on its engine, or within the transaction of its session or connection."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.util import greenlet_spawn

from outbox.errors import ConfigurationError
from outbox.store import snapshots
from outbox.testing.calling import calling
from outbox.testing.database import bind_of, own_pool, replace_pool
from outbox.testing.reaching import connection as connection_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from outbox.inbox import Inbox, Message
    from outbox.tables import Tables

    Deliver = Callable[[Inbox, Message], object]

R = TypeVar("R")


class InTransaction:
    """Stands for an engine: each transaction is a savepoint of one that is open already, and that nobody here ends."""

    def __init__(self, connection: sa.Connection) -> None:
        self._connection = connection

    @contextmanager
    def begin(self) -> Iterator[sa.Connection]:
        """Begin a savepoint."""
        begin_really(self._connection)
        with self._connection.begin_nested():
            yield self._connection


def begin_really(connection: sa.Connection) -> None:
    """Let SQLite begin what SQLAlchemy has begun: its driver waits for the first change, and a savepoint before that commits."""
    if connection.dialect.name == "sqlite" and not getattr(connection.connection.driver_connection, "in_transaction", True):
        connection.exec_driver_sql("BEGIN")


def is_async_target(target: Any) -> bool:
    """Tell whether what is done with the target is to be awaited."""
    target = _unscoped(target)
    return hasattr(target, "run_sync") or hasattr(target, "sync_engine")


def joined(target: Any, tables: Tables, inboxes: Sequence[Inbox], work: Callable[[Any, Deliver], R]) -> R:
    """Do some work with what stands for an engine, and with what hands a message to an inbox."""
    with ExitStack() as stack:
        if isinstance(target, sa.Engine):
            return work(target, stack.enter_context(_delivering(inboxes)))
        if any(inbox.is_async for inbox in inboxes):
            raise ConfigurationError("an async inbox cannot join a plain session; hand over the AsyncSession or AsyncConnection")
        connection = connection_in(target, tables)
        result = _within(connection, dict.fromkeys(inboxes, connection), work)
        if hasattr(target, "expire_all"):
            target.expire_all()  # the handlers have changed rows behind the session's back
        return result


async def joined_async(target: Any, tables: Tables, inboxes: Sequence[Inbox], work: Callable[[Any, Deliver], R]) -> R:
    """Do the same for an async target."""
    target = _unscoped(target)
    if not hasattr(target, "run_sync"):
        return await greenlet_spawn(work, target.sync_engine, _process)
    plain = await target.run_sync(connection_in, tables)
    around = target if hasattr(target, "sync_connection") else await target.connection()
    binds = {inbox: around if inbox.is_async else plain for inbox in inboxes}
    return await greenlet_spawn(_within, plain, binds, work)


def _within(connection: sa.Connection, binds: dict[Inbox, Any], work: Callable[[Any, Deliver], R]) -> R:
    begin_really(connection)
    limits = snapshots.limits(connection)
    with ExitStack() as stack:
        for inbox, bind in binds.items():
            stack.enter_context(_bound(inbox, bind))
        result = work(InTransaction(connection), _process)
    snapshots.set_limits(connection, limits)
    return result


@contextmanager
def _bound(inbox: Inbox, bind: Any) -> Iterator[None]:
    """Let the sessions of an inbox join the transaction of a connection for the block."""
    sessions = inbox.sessions
    before = dict(sessions.kw)
    sessions.configure(bind=bind, binds=None, join_transaction_mode="create_savepoint")
    try:
        yield
    finally:
        sessions.kw.clear()
        sessions.kw.update(before)


@contextmanager
def _delivering(inboxes: Sequence[Inbox]) -> Iterator[Deliver]:
    awaited = [inbox for inbox in inboxes if inbox.is_async]
    if not awaited:
        yield _process
        return
    with calling(is_async=True) as call, ExitStack() as stack:
        for bind in dict.fromkeys(map(bind_of, awaited)):
            pool = own_pool(bind)
            if pool is not None:
                stack.callback(call, replace_pool, bind, pool)
        yield lambda inbox, message: call(inbox.process, message) if inbox.is_async else inbox.process(message)


def _process(inbox: Inbox, message: Message) -> object:
    return inbox.process(message)


def _unscoped(target: Any) -> Any:
    return target() if hasattr(target, "registry") else target
