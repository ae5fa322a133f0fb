"""`leased`: a message is held by a lease while its effect happens outside the database, and its result is kept."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, overload

from sqlalchemy.util import greenlet_spawn

from outbox.errors import ConfigurationError
from outbox.inbox.dedup import checked
from outbox.inbox.hold import holding
from outbox.inbox.lease import AsyncLease, Lease
from outbox.inbox.lease_record import LeaseRecord
from outbox.tables import DEFAULT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractAsyncContextManager, AbstractContextManager
    from types import TracebackType

    from sqlalchemy.ext.asyncio import async_sessionmaker
    from sqlalchemy.orm import sessionmaker

    from outbox.inbox.handlers import Rules
    from outbox.inbox.hold import Hold
    from outbox.tables import Tables


@overload
def leased(
    sessions: sessionmaker[Any],
    consumer: str,
    message_id: str,
    *,
    lease_s: float = 60.0,
    time_limit_s: float = 300.0,
    tables: Tables = DEFAULT,
) -> AbstractContextManager[Lease]: ...
@overload
def leased(
    sessions: async_sessionmaker[Any],
    consumer: str,
    message_id: str,
    *,
    lease_s: float = 60.0,
    time_limit_s: float = 300.0,
    tables: Tables = DEFAULT,
) -> AbstractAsyncContextManager[AsyncLease]: ...
def leased(
    sessions: Any,
    consumer: str,
    message_id: str,
    *,
    lease_s: float = 60.0,
    time_limit_s: float = 300.0,
    tables: Tables = DEFAULT,
) -> Any:
    """Hold `message_id` for `consumer` while its effect happens outside the database, and keep the effect's result.

        with leased(sessions, "payments", message_id) as lease:      # async with, for an async_sessionmaker
            if lease.first:
                charge = provider.charge(amount, idempotency_key=lease.idempotency_key)
                lease.complete(charge)
            else:
                charge = lease.result                                # what came of it the first time
        # then acknowledge the message

    The lease is taken in one short transaction, before the effect, and a heartbeat renews it every third of `lease_s`, for
    as long as the block runs and the last `lease.progress()`, or its start, is not longer ago than `time_limit_s`. A
    block that ends without `complete` completes with no result; one that raises gives the message back at once.

    Guaranteed: no two workers hold the message at the same time by the database's clock; a result is written only by
    the worker that still holds it (by a fencing token), and once it is, every later delivery gets that result and
    `first` is False. Not guaranteed: that the effect is tried only once. A worker that dies, hangs or sleeps between the
    effect and `complete` leaves the message to another, which tries it again under the same `idempotency_key`: it is for the
    other system to know that key. A worker that was paused past its lease may send its request late.

    Raises at the call `InvalidMessageId` and `ConfigurationError`; at the start of the block `Busy` when another worker
    holds the message (`retry_after_s` says for how long at most); at its end `LeaseLost`, and `NoTransaction` when
    `complete(session=...)` was not committed. After any exception: do not acknowledge.

    It takes connections of `sessions` for moments only, one for itself and one for the heartbeat: give the pool room for
    both. Under asyncio the heartbeat needs the event loop: a handler that blocks it loses its lease.
    """
    if lease_s <= 0 or time_limit_s <= 0:
        raise ConfigurationError(f"lease_s and time_limit_s must be more than zero, not {lease_s} and {time_limit_s}")
    names = {"consumer": checked("consumer", consumer), "message_id": checked("message_id", message_id)}
    record = LeaseRecord(sessions, tables, **names, lease_s=lease_s)
    is_async = hasattr(sessions.class_, "run_sync")
    block = holding(record, time_limit_s=time_limit_s, is_async=is_async)
    return _InGreenlets(block) if is_async else _leased(block)


def run_leased(record: LeaseRecord, rules: Rules, *, is_async: bool, call: Callable[[Any], Any]) -> bool:
    """Call a handler with a lease, and keep what it returns as the result; return False for a message that is done already.

    For an async inbox, to be run in a greenlet.
    """
    with holding(record, time_limit_s=rules.time_limit_s, is_async=is_async) as hold:
        if hold.first:
            hold.returned(call(AsyncLease(hold) if is_async else Lease(hold)))
        return hold.first


@contextmanager
def _leased(block: AbstractContextManager[Hold]) -> Iterator[Lease]:
    with block as hold:
        yield Lease(hold)


class _InGreenlets:
    """Runs both ends of a block as SQLAlchemy runs what is written without `await`."""

    def __init__(self, block: AbstractContextManager[Hold]) -> None:
        self._block = block

    async def __aenter__(self) -> AsyncLease:
        return AsyncLease(await greenlet_spawn(self._block.__enter__))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return await greenlet_spawn(self._block.__exit__, kind, error, traceback)
