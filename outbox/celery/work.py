"""Where the calls of tasks go: into the outbox with a transaction, directly to the broker, or nowhere."""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from outbox import checks
from outbox.enqueueing import enqueue
from outbox.tables import DEFAULT
from outbox.targets import is_async_connection, session_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from uuid import UUID

    from outbox.events import Event
    from outbox.tables import Tables
    from outbox.targets import Target


class Outside(Enum):
    """What becomes of a call outside every unit of work."""

    DIRECT = "direct"  # published at once, as Celery does
    REFUSED = "refused"  # an error


class UnitOfWork:
    """The transaction that calls of tasks are enqueued in. `message_ids` are those enqueued so far, in order."""

    def __init__(self, target: Target, *, key: str | None, tables: Tables) -> None:
        self.message_ids: list[UUID] = []
        self.key = key
        self._target = target
        self._tables = tables

    def enqueue(self, event: Event) -> None:
        """Add a message to the transaction."""
        self.message_ids.append(enqueue(self._target, event, tables=self._tables))


_current: ContextVar[UnitOfWork | Outside | None] = ContextVar("outbox_celery_work", default=None)


@contextmanager
def unit_of_work(target: Target, *, key: str | None = None, tables: Tables = DEFAULT) -> Iterator[UnitOfWork]:
    """Let every task that is called inside, of any `OutboxCelery`, be published if and only if the transaction commits.

        with sessions.begin() as session, unit_of_work(session):
            session.add(order)
            ship.delay(order.id)

    `target` is what `outbox.enqueue` takes: a `Session`, an `AsyncSession`, a scoped one of either, or a `Connection`;
    not an `AsyncConnection`, because `delay()` cannot be awaited. `key` is the ordering key of these messages: those of
    one key reach the broker in order. That says nothing of the order in which several workers finish them.

    It holds for this thread or asyncio task. It begins, flushes, commits and rolls back nothing, and neither the broker
    nor the result backend is contacted.

    Raises `TypeError` for another target and `InvalidEvent` for a key that none may have. A call inside raises what
    `outbox.enqueue` does, and `NotThroughOutbox` for what needs the broker or the result backend at once.
    """
    if is_async_connection(target):
        raise TypeError("an AsyncConnection cannot take a task: delay() cannot be awaited; pass an AsyncSession")
    if not isinstance(target, sa.Connection):
        session_of(target)
    checks.key(key)
    with _going(UnitOfWork(target, key=key, tables=tables)) as work:
        yield work


@contextmanager
def direct() -> Iterator[None]:
    """Let every task that is called inside be published at once, as Celery does, whatever becomes of any transaction."""
    with _going(Outside.DIRECT):
        yield


@contextmanager
def refused() -> Iterator[None]:
    """Refuse calls inside, unless something else was said around it: for the body of a task."""
    if _current.get() is not None:
        yield
        return
    with _going(Outside.REFUSED):
        yield


def current() -> UnitOfWork | Outside | None:
    """Return where calls go here; None when nothing was said."""
    return _current.get()


@contextmanager
def _going(where: Any) -> Iterator[Any]:
    token = _current.set(where)
    try:
        yield where
    finally:
        _current.reset(token)
