"""Decides what happens to a delivery that has been handled: acknowledged, or held back and then requeued."""

from __future__ import annotations

import logging
from collections import Counter
from time import monotonic
from typing import TYPE_CHECKING

from sqlalchemy.exc import DBAPIError, OperationalError

from outbox.backoff import Backoff
from outbox.inbox.busy import sqlstate
from outbox.inbox.errors import Busy, InvalidMessageId, NoHandler, UnusableMessage
from outbox.inbox.retries import Failures, Holds
from outbox.outage import Outage
from outbox.points import Point, reached

if TYPE_CHECKING:
    from outbox.inbox.link import Link
    from outbox.inbox.workers import Finished

log = logging.getLogger("outbox.inbox")

RETRY = Backoff(first_s=1, ceiling_s=60, floor=0.5)
BUSY = Backoff(first_s=1, ceiling_s=1, floor=0.5)
DATABASE_AWAY = Backoff(first_s=0.5, ceiling_s=5, floor=0.5)
_EXPLAINED = (InvalidMessageId, NoHandler, UnusableMessage)  # their text says it all; a traceback adds nothing


class Settler:
    """Settles finished deliveries on the link, in the thread that owns it.

    A failed delivery keeps its place in the prefetch window while it is held, so that no more than a
    window of failing messages goes round, each at most once per backoff.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._holds = Holds()
        self._failures = Failures()
        self._database = Outage(log, "database", DATABASE_AWAY)

    def settle(self, finished: Finished, link: Link) -> None:
        """Acknowledge what was handled or is a duplicate, and hold back the rest. Raises `BrokerUnavailable`."""
        if finished.error is not None:
            delay_s = self._delay_s(finished, finished.error)
            self._holds.add(finished.delivery, until=monotonic() + delay_s)
        elif finished.result is not None:
            self.counts[finished.result] += 1
            self._database.over()
            self._failures.forget(_id(finished))
            reached(Point.BEFORE_ACK)
            link.ack(finished.delivery)

    def requeue_due(self, link: Link) -> None:
        """Give back to the broker what was held long enough. Raises `BrokerUnavailable`."""
        for delivery in self._holds.due(monotonic()):
            link.requeue(delivery)

    def wait_s(self, at_most: float) -> float:
        """Return how long it is, in seconds, until something is to be requeued."""
        return self._holds.wait_s(monotonic(), at_most=at_most)

    def _delay_s(self, finished: Finished, error: BaseException) -> float:
        message_id = _id(finished)
        if isinstance(error, Busy):
            self.counts["busy"] += 1
            log.info("message is locked by another transaction; requeued", extra={"message_id": message_id})
            return BUSY.delay_s(1)
        self.counts["failed"] += 1
        if is_database_away(error):
            return self._database.pause_s(error)
        failures = self._failures.add(message_id)
        delay_s = RETRY.delay_s(failures)
        self._report(finished, error, failures, delay_s)
        return delay_s

    def _report(self, finished: Finished, error: BaseException, failures: int, delay_s: float) -> None:
        extra = {
            "message_id": _id(finished),
            "topic": finished.message.topic if finished.message else None,
            "failures": failures,
            "retry_in_s": round(delay_s, 1),
        }
        if isinstance(error, _EXPLAINED):
            log.error("message cannot be handled; rolled back", extra={**extra, "error": str(error)})
        else:
            log.error("handling failed; rolled back", extra=extra, exc_info=error)


def is_database_away(error: BaseException) -> bool:
    """Tell whether an error says that the database is gone, starting, or shutting down, rather than that something is wrong."""
    if not isinstance(error, DBAPIError):
        return False
    state = sqlstate(error)
    if error.connection_invalidated or (state or "").startswith(("08", "57P", "53300")):
        return True
    # a failed connect has no SQLSTATE
    return state is None and isinstance(error, OperationalError) and not hasattr(error.orig, "sqlite_errorcode")


def _id(finished: Finished) -> str:
    return finished.message.message_id if finished.message else ""
