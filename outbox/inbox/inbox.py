"""`Inbox`: one consumer's handlers, and the transaction that each message is handled in."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeVar

from outbox import wire
from outbox.errors import ConfigurationError
from outbox.inbox.busy import bound_lock_waits, busy_on_lock_timeout
from outbox.inbox.dedup import checked, once
from outbox.inbox.errors import NoHandler, UnusableMessage
from outbox.inbox.handlers import Handlers
from outbox.points import Point, reached
from outbox.tables import DEFAULT

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.ext.asyncio import async_sessionmaker
    from sqlalchemy.orm import sessionmaker

    from outbox.inbox.message import Message
    from outbox.tables import Tables

Handler = TypeVar("Handler", bound="Callable[[Any, Message], Any]")


class Result(StrEnum):
    """What `Inbox.process` did; in both cases the message can be acknowledged."""

    HANDLED = "handled"
    DUPLICATE = "duplicate"


class Inbox:
    """Handles each message once for one consumer, in one database transaction with the effects of its handler.

    `consumer` is the name that messages are recorded under: never change it, or everything still in the broker
    counts as new. `sessions` makes the sessions; an `async_sessionmaker` makes this an inbox of `async def` handlers.
    `queue` (default: the consumer's name) and `exchange` say where `outbox-consume` gets its messages.
    `lock_timeout_s` bounds, on PostgreSQL, every wait for a lock in the transaction, the handler's own included;
    a message that meets it is requeued. None leaves the database's own setting.

        inbox = Inbox("shipping", sessions=sessionmaker(engine))

        @inbox.handles("orders.placed")
        def ship(session, message): ...

    Guaranteed: an effect that a handler has through its session happens once per message id, whatever is redelivered
    and whatever crashes. Not guaranteed: effects elsewhere (give `message.message_id` to that system as its idempotency
    key), and any order between messages that are handled at the same time.
    """

    def __init__(
        self,
        consumer: str,
        *,
        sessions: sessionmaker[Any] | async_sessionmaker[Any],
        tables: Tables = DEFAULT,
        queue: str | None = None,
        exchange: str = wire.DEFAULT_EXCHANGE,
        lock_timeout_s: float | None = 2.0,
    ) -> None:
        self.consumer = checked("consumer", consumer)
        self.queue = queue or consumer
        self.exchange = exchange
        self._sessions: Any = sessions
        self._tables = tables
        self._lock_timeout_s = lock_timeout_s
        self._handlers = Handlers(is_async=hasattr(sessions.class_, "run_sync"))

    @property
    def is_async(self) -> bool:
        """Whether the handlers are `async def`."""
        return self._handlers.is_async

    @property
    def patterns(self) -> tuple[str, ...]:
        """The topic patterns with a handler, in the order in which they are tried."""
        return self._handlers.patterns

    def handles(self, *patterns: str) -> Callable[[Handler], Handler]:
        """Register the decorated `handler(session, message)` for topics that match one of the patterns.

        `*` stands for one word and `#` for any number. One handler gets a message: the first one registered
        that matches. It must not commit or roll back. Whatever it raises undoes the whole transaction.

        Raises `ConfigurationError` for a pattern that is malformed or taken, and for an `async def` handler with a
        plain `sessionmaker` or the other way round.
        """

        def register(handler: Handler) -> Handler:
            self._handlers.check_kind(handler)
            for pattern in patterns:
                self._handlers.add(pattern, handler)
            return handler

        if not patterns:
            raise ConfigurationError("handles() needs at least one topic pattern, such as 'orders.*'")
        return register

    def once(self, session: Any, message_id: str) -> Any:
        """Return `once(session, ...)` for this consumer, for a loop of your own."""
        return once(session, self.consumer, message_id, tables=self._tables)

    def process(self, message: Message) -> Result:
        """Handle one message in a transaction of its own; acknowledge it after this has returned.

        Raises `NoHandler`, `UnusableMessage` and `InvalidMessageId` before anything is done, `Busy` when another transaction
        is at the same message, `TransactionAborted` and `NoTransaction` as `once` does, and whatever the handler
        raises. After any exception everything is rolled back: deliver the message again later. When the connection
        is lost during the COMMIT nobody knows its outcome; the next delivery finds out.
        """
        handler = self._handler_of(message)
        with busy_on_lock_timeout(), self._sessions() as session, session.begin():
            bound_lock_waits(session, self._tables, self._lock_timeout_s)
            with self.once(session, message.message_id) as first:
                if first:
                    handler(session, message)
            reached(Point.BEFORE_COMMIT)
        return Result.HANDLED if first else Result.DUPLICATE

    async def process_async(self, message: Message) -> Result:
        """Do what `process` does, for an inbox with an `async_sessionmaker`."""
        handler = self._handler_of(message)
        with busy_on_lock_timeout():
            async with self._sessions() as session, session.begin():
                await session.run_sync(bound_lock_waits, self._tables, self._lock_timeout_s)
                async with self.once(session, message.message_id) as first:
                    if first:
                        await handler(session, message)
                reached(Point.BEFORE_COMMIT)
        return Result.HANDLED if first else Result.DUPLICATE

    async def dispose(self) -> None:
        """Close the pooled connections of an `async_sessionmaker`, which belong to the running event loop."""
        bind = self._sessions.kw.get("bind")
        if bind is not None:
            await bind.dispose()

    def _handler_of(self, message: Message) -> Callable[[Any, Message], Any]:
        if not message.message_id:
            raise UnusableMessage("the message has no id; whoever publishes it must set the property message_id")
        handler = self._handlers.find(message.topic)
        if handler is None:
            text = f"consumer {self.consumer!r} has no handler for topic {message.topic!r}; register one, or unbind"
            raise NoHandler(f"{text} the topic from queue {self.queue!r}")
        return handler
