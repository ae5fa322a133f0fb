"""`Inbox`: one consumer's handlers, and the transaction that each message is handled in."""

from __future__ import annotations

import logging
import os
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from sqlalchemy.util import await_only, greenlet_spawn

from outbox import checks, wire
from outbox.errors import ConfigurationError
from outbox.inbox.busy import bound_waits, busy_on_lock_timeout
from outbox.inbox.dedup import checked, once
from outbox.inbox.errors import NoHandler, UnusableMessage
from outbox.inbox.handlers import Handlers, Handling, Mode, Rules
from outbox.inbox.lease_record import LeaseRecord
from outbox.inbox.leasing import run_leased
from outbox.inbox.limits import may_commit, within
from outbox.inbox.transaction import OpenTransaction, connection_of
from outbox.points import Point, reached
from outbox.states import OnDead
from outbox.tables import DEFAULT
from outbox.tracing.names import RABBITMQ
from outbox.tracing.processing import processing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Unpack

    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import async_sessionmaker
    from sqlalchemy.orm import Session, sessionmaker

    from outbox.inbox.handlers import RuleOptions
    from outbox.inbox.message import Message
    from outbox.tables import Tables

log = logging.getLogger("outbox.inbox")

Handler = TypeVar("Handler", bound="Callable[[Any, Message], Any]")


class Result(StrEnum):
    """What became of one delivery; in every case the message can be acknowledged."""

    HANDLED = "handled"
    DUPLICATE = "duplicate"  # it was handled before
    RETRY = "retry"  # it has failed, and waits among the failed messages for its next try
    WAITING = "waiting"  # it waits there already, or behind an earlier message of its key
    DEAD = "dead"  # it has failed for good, and waits there for an operator


class Inbox:
    """Handles each message once for one consumer, in one database transaction with the effects of its handler.

    `consumer` is the name that messages are recorded under: never change it, or everything still in the broker
    counts as new. `sessions` makes the sessions; an `async_sessionmaker` makes this an inbox of `async def` handlers.
    `queue` (default: the consumer's name) and `exchange` say where `outbox-consume` gets its messages.
    `ordered` handles the messages of one key one after another, in the order of the queue, while others run beside them: one
    that fails holds up the later ones of its key, and one that is dead does so if its `retry` policy says `block`.
    `dead_letter_topic`: a copy of each message that is given up goes into the outbox under this topic, in the same transaction.
    `lock_timeout_s` bounds, on PostgreSQL, every wait for a lock in the transaction, the handler's own included;
    a message that meets it is requeued. None leaves the database's own setting.
    `continue_traces`: with OpenTelemetry, handlers run in the trace in which their message was created. Without, each has a trace
    of its own, linked to that one.

        inbox = Inbox("shipping", sessions=sessionmaker(engine))

        @inbox.transactional("orders.placed")
        def ship(session, message): ...

    Guaranteed: an effect that a handler has through its session happens once per message id, whatever is redelivered
    and whatever crashes. Not guaranteed: effects elsewhere (register those with `leased`), and any order between messages
    that are handled at the same time.
    """

    def __init__(
        self,
        consumer: str,
        *,
        sessions: sessionmaker[Any] | async_sessionmaker[Any],
        tables: Tables = DEFAULT,
        queue: str | None = None,
        exchange: str = wire.DEFAULT_EXCHANGE,
        ordered: bool = False,
        dead_letter_topic: str | None = None,
        lock_timeout_s: float | None = 2.0,
        continue_traces: bool = False,
    ) -> None:
        self.consumer = checked("consumer", consumer)
        self.tables = tables
        self.ordered = ordered
        if dead_letter_topic is not None:
            checks.topic(dead_letter_topic)
        self.dead_letter_topic = dead_letter_topic
        self.queue = queue or consumer
        self.exchange = exchange
        self.sessions: Any = sessions
        self.messaging_system = RABBITMQ
        """What traces say the messages come through; who gets them from elsewhere says so here."""
        self._lock_timeout_s = lock_timeout_s
        self._continue_traces = continue_traces
        self._handlers = Handlers(is_async=hasattr(sessions.class_, "run_sync"))

    @property
    def is_async(self) -> bool:
        """Whether the handlers are `async def`."""
        return self._handlers.is_async

    @property
    def handlers(self) -> tuple[Handling, ...]:
        """What is registered, in the order in which it is tried."""
        return tuple(self._handlers)

    @property
    def patterns(self) -> tuple[str, ...]:
        """The topic patterns with a handler, in the order in which they are tried."""
        return self._handlers.patterns

    def transactional(self, *patterns: str, **rules: Unpack[RuleOptions]) -> Callable[[Handler], Handler]:
        """Register `handler(session, message)` for topics that match a pattern; its effects are in the database of the session.

        They commit together with the record of the message, so a second delivery has none. The handler must not commit
        or roll back. Whatever it raises undoes all of it, and `rules` (see `Rules`) say what follows.

        `*` stands for one word of a topic and `#` for any number. One handler gets a message: the first one registered
        that matches. Raises `ConfigurationError` for a pattern that is malformed or taken, for rules that cannot work, and
        for an `async def` handler with a plain `sessionmaker` or the other way round.
        """
        return self._registering(patterns, Mode.TRANSACTIONAL, rules)

    def leased(self, *patterns: str, **rules: Unpack[RuleOptions]) -> Callable[[Handler], Handler]:
        """Register `handler(lease, message)`, whose effects are outside the database: a payment, an e-mail, a call over HTTP.

        No transaction covers those. The message is leased (see `leased`) for `lease_s` at a time before the handler runs, which
        hands `lease.idempotency_key` to the other system; what it returns, as JSON, is kept as the result, unless it has
        called `lease.complete` itself. Patterns, rules and errors as for `transactional`.
        """
        return self._registering(patterns, Mode.LEASED, rules)

    def idempotent(self, *patterns: str, because: str, **rules: Unpack[RuleOptions]) -> Callable[[Handler], Handler]:
        """Register `handler(session, message)` that may run any number of times, for the reason given in `because`.

        Nothing is recorded and no duplicate is dropped: it runs at every delivery, in a transaction of its own.
        Patterns, rules and errors as for `transactional`.
        """
        if not because.strip():
            raise ConfigurationError("idempotent() needs because=: why does a second execution change nothing?")
        return self._registering(patterns, Mode.IDEMPOTENT, rules, because)

    def _registering(
        self, patterns: tuple[str, ...], mode: Mode, rules: RuleOptions, because: str | None = None
    ) -> Callable[[Handler], Handler]:
        if not patterns:
            raise ConfigurationError(f"{mode}() needs at least one topic pattern, such as 'orders.*'")
        checked_rules = Rules(**rules)

        def register(handler: Handler) -> Handler:
            self._handlers.check_kind(handler)
            for pattern in patterns:
                handling = Handling(pattern=pattern, handler=handler, mode=mode, rules=checked_rules, because=because)
                self._handlers.add(handling)
            return handler

        return register

    def once(self, session: Any, message_id: str) -> Any:
        """Return `once(session, ...)` for this consumer, for a loop of your own."""
        return once(session, self.consumer, message_id, tables=self.tables)

    def process(self, message: Message) -> Result:
        """Handle one message in a transaction of its own, or under a lease; acknowledge it after this has returned.

        Raises `NoHandler`, `UnusableMessage` and `InvalidMessageId` before anything is done, `Busy` when another transaction
        is at the same message, `TransactionAborted` and `NoTransaction` as `once` does, and whatever the handler
        raises. After any exception everything is rolled back: deliver the message again later. A leased handler's effect
        is not, see `leased`; it may also raise `LeaseLost` and `InvalidResult`. When the connection
        is lost during the COMMIT nobody knows its outcome; the next delivery finds out.
        """
        handling = self.handling_of(message)
        with processing(
            message.headers,
            topic=message.topic,
            message_id=message.message_id,
            consumer=self.consumer,
            system=self.messaging_system,
            continues=self._continue_traces,
        ) as delivery:
            result = self._handled(handling, message)
            delivery.came_to(result.value)
        return result

    def _handled(self, handling: Handling, message: Message) -> Result:
        if handling.mode is Mode.LEASED:
            return self._leased(handling, message)
        with busy_on_lock_timeout():
            return self._once(handling, message) if handling.mode is Mode.TRANSACTIONAL else self._again(handling, message)

    async def process_async(self, message: Message) -> Result:
        """Do what `process` does, for an inbox with an `async_sessionmaker`."""
        return await greenlet_spawn(self.process, message)

    def handling_of(self, message: Message) -> Handling:
        """Return what handles a message. Raises `UnusableMessage` for one without an id, and `NoHandler`."""
        if not message.message_id:
            raise UnusableMessage("the message has no id; whoever publishes it must set the property message_id")
        handling = self._handlers.find(message.topic)
        if handling is None:
            text = f"consumer {self.consumer!r} has no handler for topic {message.topic!r}; register one, or unbind"
            raise NoHandler(f"{text} the topic from queue {self.queue!r}")
        return handling

    def rules_of(self, message: Message) -> Rules:
        """Return what a failure of a message leads to, also of one that nothing here handles."""
        try:
            return self.handling_of(message).rules
        except (NoHandler, UnusableMessage):
            return Rules()

    def mode_of(self, message: Message) -> Mode | None:
        """Return how a message is handled; None for one that nothing here handles."""
        handling = self._handlers.find(message.topic)
        return None if handling is None else handling.mode

    def waits_for_dead(self, topic: str) -> bool:
        """Tell whether a message of this topic waits while an earlier one of its key is dead: `ordered`, and the policy `block`."""
        handling = self._handlers.find(topic)
        rules = Rules() if handling is None else handling.rules
        return self.ordered and rules.retry.on_dead == OnDead.BLOCK

    def _once(self, handling: Handling, message: Message) -> Result:
        with (
            self._transaction(handling.rules) as (session, given),
            once(session, self.consumer, message.message_id, tables=self.tables) as first,
        ):
            if first:
                self._call(handling, given, message)
            self._before_commit()
        return Result.HANDLED if first else Result.DUPLICATE

    def _again(self, handling: Handling, message: Message) -> Result:
        with self._transaction(handling.rules) as (session, given):
            transaction = OpenTransaction(session, self.tables)
            self._call(handling, given, message)
            transaction.check(may_be_empty=True)
            self._before_commit()
        return Result.HANDLED

    @staticmethod
    def _before_commit() -> None:
        reached(Point.BEFORE_COMMIT)
        may_commit()  # the last word: a handler that was given up has no effect

    def _leased(self, handling: Handling, message: Message) -> Result:
        names = {"consumer": self.consumer, "message_id": checked("message_id", message.message_id)}
        record = LeaseRecord(self.sessions, self.tables, **names, lease_s=handling.rules.lease_s)
        call = partial(self._call, handling, message=message)
        first = run_leased(record, handling.rules, is_async=self.is_async, call=call)
        return Result.HANDLED if first else Result.DUPLICATE

    @contextmanager
    def _transaction(self, rules: Rules) -> Iterator[tuple[Session, Any]]:
        """Give a session in a transaction, and what stands for it in a handler: itself, or the `AsyncSession` around it."""
        given = self.sessions()
        with given.sync_session if self.is_async else given as session, session.begin():
            bound_waits(session, self.tables, lock_timeout_s=self._lock_timeout_s, idle_s=rules.time_limit_s)
            yield session, given

    @contextmanager
    def transaction(self) -> Iterator[tuple[Session, Connection]]:
        """Give a session in a transaction of its own, and its connection, for what the inbox itself writes down."""
        given = self.sessions()
        with given.sync_session if self.is_async else given as session, session.begin():
            yield session, connection_of(session, self.tables, own=True)

    def _call(self, handling: Handling, given: Any, message: Message) -> Any:
        """Call a handler; an `async def` one is awaited from the greenlet that `process_async` has started."""
        pid = os.getpid()
        try:
            called = handling.handler(given, message)
            return await_only(within(called, handling.rules)) if self.is_async else called
        finally:
            if os.getpid() != pid:
                _leave_fork()

    async def dispose(self) -> None:
        """Close the pooled connections of an `async_sessionmaker`, which belong to the running event loop."""
        bind = self.sessions.kw.get("bind")
        if bind is not None:
            await bind.dispose()


def _leave_fork() -> NoReturn:
    """End a child that a handler has forked and let return: it shares its parent's connections, and would commit on them."""
    log.critical("a handler has forked, and the child came back from it; the child ends here, use os._exit or subprocess in it")
    os._exit(1)
