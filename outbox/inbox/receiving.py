"""Handles one message to its end, of which every part is in the database before it is acknowledged: done, to be tried again, dead."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from outbox import clock
from outbox.enqueueing import enqueue
from outbox.errors import InvalidEvent
from outbox.events import Event
from outbox.inbox import failing, stored
from outbox.inbox.errors import NoHandler, ProcessDied, UnusableMessage
from outbox.inbox.handlers import Mode
from outbox.inbox.inbox import Result
from outbox.observe.logs import logged
from outbox.points import Point, reached
from outbox.store import failed, leases
from outbox.store.dialects import limit_statements
from outbox.store.failed import Failure
from outbox.store.failed_stats import failed_counts
from outbox.telemetry import DuplicateDropped, HandlingBegan, HandlingEnded, MessageDied, MessageHandled, MessageRetried

if TYPE_CHECKING:
    from sqlalchemy import Connection
    from sqlalchemy.orm import Session

    from outbox.inbox.handlers import Handling, Rules
    from outbox.inbox.inbox import Inbox
    from outbox.inbox.limits import Guard
    from outbox.inbox.message import Message
    from outbox.store.failed import Claimed
    from outbox.store.failed_stats import FailedCounts
    from outbox.telemetry import Telemetry

log = logging.getLogger("outbox.inbox")

_COMMITTED = (
    "the handler committed by itself and failed after that; the message counts as handled, and what was not done yet is missing"
)

_MOST_COUNTED = 5000
_LOOK_LIMIT_S = 2.0
_MARGIN_S = 30.0  # how much longer than its time limit a try may take before it counts as dead with its process


@dataclass(frozen=True, slots=True)
class Work:
    """A message to be handled: as it was delivered, or as it was claimed among those that have failed before."""

    message: Message
    claimed: Claimed | None = None


class Receiver:
    """Has messages handled by an inbox, and writes down what becomes of those that fail.

    An exception means that nothing was written down, through no fault of the message: it is to be tried again, without an end.
    All methods are plain functions; those of an inbox with `async def` handlers run in a greenlet of its event loop.
    """

    def __init__(self, inbox: Inbox, telemetry: Telemetry | None = None) -> None:
        self._inbox = inbox
        self._tables = inbox.tables
        self._emit = (telemetry or logged()).emit

    def claim(self, most: int) -> list[Work]:
        """Take up to `most` messages whose next try is due."""
        lease_s = max(handling.rules.time_limit_s for handling in self._inbox.handlers) + _MARGIN_S
        with self._inbox.transaction() as (_session, connection):
            claimed = failed.claim(connection, self._tables, self._inbox.consumer, most=most, lease_s=lease_s)
        return [Work(stored.from_row(each.values), each) for each in claimed]

    def check(self) -> None:
        """Ask the database whether it answers and has the tables."""
        with self._inbox.transaction() as (_session, connection):
            failed.check(connection, self._tables)

    def look(self) -> FailedCounts:
        """Count the failed messages, for metrics."""
        with self._inbox.transaction() as (_session, connection):
            limit_statements(connection, _LOOK_LIMIT_S)
            return failed_counts(connection, self._tables, self._inbox.consumer, most=_MOST_COUNTED)

    def receive(self, work: Work, guard: Guard) -> Result:
        """Handle a message, with `guard` over its handler."""
        message = work.message
        try:
            handling = self._inbox.handling_of(message)
        except (NoHandler, UnusableMessage) as error:
            return self.fail(work, error)
        rules = handling.rules
        attempts = self._begin(work, rules)
        if attempts is None:
            return Result.WAITING
        if attempts > rules.retry.max_attempts:
            return self.fail(work, ProcessDied())
        reached(Point.AFTER_COUNT)
        try:
            result = self._try(message, handling, guard)
        except BaseException as error:
            if guard.given_up:
                raise  # whoever gave it up has that written down
            if failing.is_not_its_fault(error):
                self.give_back(work, failing.retry_after_s(error))
                raise
            return self.fail(work, error)
        if attempts:
            self._clear(message)
        return result

    def _try(self, message: Message, handling: Handling, guard: Guard) -> Result:
        """Have a message handled, and tell of it; not while the guard may interrupt, which is for the handler alone."""
        about = {**self._about(message), "handler": handling.pattern}
        self._emit(HandlingBegan(**about))
        began = clock.seconds()
        try:
            with guard.running(handling.rules, interruptible=not self._inbox.is_async):
                result = self._inbox.process(message)
        except BaseException as error:
            self._emit(HandlingEnded(**about, seconds=clock.seconds() - began, ran=True, error=error))
            raise
        ran = result is Result.HANDLED
        self._emit(HandlingEnded(**about, seconds=clock.seconds() - began, ran=ran))
        self._emit(MessageHandled(**about) if ran else DuplicateDropped(**self._about(message)))
        return result

    def _about(self, message: Message) -> dict[str, Any]:
        named = {"message_id": message.message_id, "topic": message.topic, "headers": message.headers}
        return {"consumer": self._inbox.consumer, **named}

    def fail(self, work: Work, error: BaseException) -> Result:
        """Write down that a try has failed, and what follows."""
        reached(Point.BEFORE_FAILURE)
        rules, claimed = self._inbox.rules_of(work.message), work.claimed
        attempts = claimed.attempts if claimed else 1
        failure = failing.decide(error, attempts=attempts, age_s=claimed.age_s if claimed else 0.0, rules=rules)
        row = stored.to_row(self._inbox.consumer, work.message)
        with self._inbox.transaction() as (session, connection):
            if self._is_recorded(connection, work.message, row):
                failure = replace(failure, delay_s=None, error=f"{_COMMITTED}: {failure.error}")
            if failed.record(connection, self._tables, row, failure, attempts=attempts) and failure.delay_s is None:
                self._bury(session, connection, row, failure)
        self._tell(work.message, error, failure, attempts)
        return Result.DEAD if failure.delay_s is None else Result.RETRY

    def give_back(self, work: Work, delay_s: float = 0.0) -> None:
        """Let a claimed message be tried again in so many seconds: this try, which has not taken place, does not count."""
        if work.claimed is not None:
            with self._inbox.transaction() as (_session, connection):
                failed.postpone(connection, self._tables, work.claimed, delay_s=delay_s)

    def _begin(self, work: Work, rules: Rules) -> int | None:
        """Return how many tries were counted with this one, 0 for a first one that need not be; None if it is not to be tried now.

        The broker's own mark tells that a message may have killed a process, so it is counted before it is tried again, and
        if that has happened once more, it waits its turn among the failed ones, apart from those that came with it.
        """
        message, inbox = work.message, self._inbox
        if work.claimed is not None:
            return work.claimed.attempts
        ordered = inbox.ordered and message.key is not None
        if not (message.redelivered or ordered):
            return 0
        row = stored.to_row(inbox.consumer, message)
        with inbox.transaction() as (_session, connection):
            if ordered and failed.wait_behind(connection, self._tables, row, dead_block=inbox.waits_for_dead(message.topic)):
                return None
            if not message.redelivered:
                return 0
            if failed.count(connection, self._tables, row, lease_s=rules.time_limit_s + _MARGIN_S):
                return 1
            delay_s = rules.retry.backoff.delay_s(2)
            failed.hasten(connection, self._tables, inbox.consumer, row["message_id"], delay_s=delay_s)
            return None

    def _clear(self, message: Message) -> None:
        inbox, message_id = self._inbox, stored.storable_id(message)
        with inbox.transaction() as (_session, connection):
            failed.clear(connection, self._tables, inbox.consumer, message_id, waits_for_dead=inbox.waits_for_dead)

    def _is_recorded(self, connection: Connection, message: Message, row: dict[str, Any]) -> bool:
        """Tell whether a message counts as handled although its handler has failed: then the handler has committed by itself."""
        if self._inbox.mode_of(message) is not Mode.TRANSACTIONAL:
            return False
        found = leases.standing(connection, self._tables, consumer=row["consumer"], message_id=row["message_id"])
        return found is not None and found.done

    def _bury(self, session: Session, connection: Any, row: dict[str, Any], failure: Failure) -> None:
        inbox = self._inbox
        if inbox.ordered and row["key"] is not None:
            failed.unblock(connection, self._tables, inbox.consumer, row["key"], waits_for_dead=inbox.waits_for_dead)
        if inbox.dead_letter_topic is not None:
            try:
                enqueue(session, _letter(inbox.dead_letter_topic, row, failure), tables=self._tables)
            except InvalidEvent as error:  # what another producer may publish is more than an event may hold
                log.warning(
                    "no copy for the dead letters' topic",
                    extra={"message_id": row["message_id"], "topic": row["topic"], "error": str(error)},
                )

    def _tell(self, message: Message, error: BaseException, failure: Failure, attempts: int) -> None:
        explained = isinstance(error, failing.EXPLAINED)
        what: dict[str, Any] = {"attempts": attempts, "error": error, "reason": failure.error, "explained": explained}
        if failure.delay_s is None:
            self._emit(MessageDied(**self._about(message), **what))
        else:
            self._emit(MessageRetried(**self._about(message), **what, retry_in_s=failure.delay_s))


def _letter(topic: str, row: dict[str, Any], failure: Failure) -> Event:
    reasons = {"dead-consumer": row["consumer"], "dead-message-id": row["message_id"], "dead-topic": row["topic"]}
    reasons |= {"dead-error": failure.error, "dead-error-class": failure.error_class}
    given = row["content_type"] or ""
    content_type = given if given.isprintable() and 0 < len(given.encode()) <= 255 else "application/octet-stream"
    return Event(topic=topic, payload=row["payload"], key=row["key"], headers=reasons, content_type=content_type)
