"""`InboxMiddleware`: a transaction around each handler, committed before FastStream acknowledges the message."""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any

from faststream import Context
from faststream.middlewares import BaseMiddleware
from sqlalchemy.ext.asyncio import AsyncSession

from outbox.errors import ConfigurationError
from outbox.faststream.acks import Safety, advice, safety_of
from outbox.faststream.handling import MESSAGE, SESSION, OneMessage
from outbox.inbox.busy import bound_waits, busy_on_lock_timeout
from outbox.inbox.dedup import checked, once
from outbox.inbox.message import Message
from outbox.points import Point, reached
from outbox.tables import DEFAULT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from faststream.context import ContextRepo
    from sqlalchemy.ext.asyncio import async_sessionmaker

    from outbox.tables import Tables

log = logging.getLogger("outbox.faststream")

InboxSession = Annotated[AsyncSession, Context(SESSION)]
"""Annotates a handler's parameter: the session whose transaction the message is recorded in."""

InboxMessage = Annotated[Message, Context(MESSAGE)]
"""Annotates a handler's parameter: the message with its topic, key and id."""


class InboxMiddleware:
    """Lets each message of a `RabbitBroker` have its effects once, for one consumer.

        inbox = InboxMiddleware("shipping", sessions=async_sessionmaker(engine))
        broker = RabbitBroker(url, middlewares=[inbox], ack_policy=AckPolicy.NACK_ON_ERROR)

        @broker.subscriber("shipping")
        async def ship(order: dict, session: InboxSession): ...

    A transaction is begun before the handler, the message's id is recorded in it, and it is committed before FastStream
    acknowledges. A duplicate is acknowledged without calling the handler. Whatever the handler raises rolls everything back,
    and the message is given back to the broker after `pause_s` seconds, so that a failing one does not go round at full
    speed; `AckMessage` is no failure: it commits. Where a subscriber's `ack_policy` would drop the message, this gives it back
    first. `dead_lettered=True` says that a policy on the broker passes rejected messages on, so that REJECT_ON_ERROR
    is right; a dead-letter exchange in the arguments of the queue is seen without it.

    `consumer`, `tables`, `lock_timeout_s` and `continue_traces`: as for `outbox.Inbox`. Handlers must not commit, roll back, or acknowledge.

    Guaranteed: effects through the session happen once per message id, whatever is redelivered and whatever crashes.
    Not guaranteed: effects elsewhere, among them what a handler returns to a `@broker.publisher`: it is published after the
    COMMIT, and a crash between the two loses it (call `outbox.enqueue` with the session instead). Messages that are read
    without a handler, by `get_one` or a loop over the subscriber, are passed on as they are.

    ACK_FIRST and MANUAL acknowledge before the COMMIT and cannot be made safe: call `check` when the application starts.
    With MANUAL no handler is called.
    """

    def __init__(
        self,
        consumer: str,
        *,
        sessions: async_sessionmaker[Any],
        tables: Tables = DEFAULT,
        lock_timeout_s: float | None = 2.0,
        pause_s: float = 1.0,
        dead_lettered: bool = False,
        continue_traces: bool = False,
    ) -> None:
        self.consumer = checked("consumer", consumer)
        self.pause_s = pause_s
        self.continue_traces = continue_traces
        self._sessions: Any = sessions
        self._tables = tables
        self._lock_timeout_s = lock_timeout_s
        self._dead_lettered = dead_lettered
        self._told: set[str] = set()
        if not hasattr(self._sessions.class_, "run_sync"):
            raise ConfigurationError("FastStream runs handlers in asyncio: pass an async_sessionmaker")

    def __call__(self, msg: Any, /, *, context: ContextRepo) -> BaseMiddleware[Any, Any]:
        """Make what FastStream wraps around one message."""
        return OneMessage(msg, context=context, inbox=self)

    def check(self, broker: Any) -> None:
        """Raise `ConfigurationError` when a subscriber of the broker acknowledges before the COMMIT.

        For the start of the application: `FastStream(broker, on_startup=[lambda: inbox.check(broker)])`.
        """
        for subscriber in broker.subscribers:
            if self.safety_of(subscriber) in {Safety.LOST, Safety.REFUSED}:
                raise ConfigurationError(advice(subscriber))

    def safety_of(self, subscriber: Any) -> Safety:
        """Tell what becomes of a failed message of a subscriber, and log once what should be set differently."""
        safety = safety_of(subscriber, dead_lettered=self._dead_lettered)
        text = advice(subscriber)
        if safety is not Safety.SAFE and text not in self._told:
            self._told.add(text)
            log.warning("ack policy of a subscriber is not safe", extra={"consumer": self.consumer, "advice": text})
        return safety

    @asynccontextmanager
    async def once(self, message: Message) -> AsyncIterator[tuple[AsyncSession, bool]]:
        """Begin a transaction, record the message, and give the session and whether the message is new; commit at the end."""
        with busy_on_lock_timeout():
            async with self._sessions() as session, session.begin():
                await session.run_sync(bound_waits, self._tables, lock_timeout_s=self._lock_timeout_s)
                async with once(session, self.consumer, message.message_id, tables=self._tables) as first:
                    yield session, first
                    reached(Point.BEFORE_COMMIT)
