"""Decides what happens to a delivery that has been handled: acknowledged, or held for a moment and then tried again."""

from __future__ import annotations

import logging
from time import monotonic
from typing import TYPE_CHECKING

from outbox.backoff import Backoff
from outbox.inbox.failing import is_contended, is_database_away, retry_after_s
from outbox.inbox.holds import Holds
from outbox.mention import naming
from outbox.points import Point, reached

if TYPE_CHECKING:
    from collections import Counter

    from outbox.inbox.jobs import Finished, Job
    from outbox.outage import Outage

log = logging.getLogger("outbox.inbox")

BUSY = Backoff(first_s=1, ceiling_s=1, floor=0.5)
UNWRITTEN = Backoff(first_s=5, ceiling_s=5, floor=0.5)


class Settler:
    """Settles finished jobs in the thread that owns the link.

    A delivery of which nothing could be written down keeps its place in the prefetch window, and is tried again here.
    """

    def __init__(self, counts: Counter[str], database: Outage) -> None:
        self._counts = counts
        self._holds = Holds()
        self._database = database

    def settle(self, finished: Finished) -> bool:
        """Acknowledge what is in the database, and hold the rest; tell whether the job is at its end.

        Raises `BrokerUnavailable`.
        """
        job = finished.job
        if finished.error is not None:
            delay_s = self._delay_s(job, finished.error)
            if job.delivery is None:
                return True  # it is among the failed ones, and due again there
            self._holds.add(job, until=monotonic() + delay_s)
            return False
        if finished.result is not None:
            self._counts[finished.result] += 1
            self._database.over()
            reached(Point.BEFORE_ACK)
            if job.delivery is not None:
                job.delivery.link.ack(job.delivery)
        return True

    def due(self) -> list[Job]:
        """Take out what was held long enough."""
        return self._holds.due(monotonic())

    def wait_s(self, at_most: float) -> float:
        """Return how long it is, in seconds, until something is to be tried again."""
        return self._holds.wait_s(monotonic(), at_most=at_most)

    def _delay_s(self, job: Job, error: BaseException) -> float:
        if is_contended(error):
            self._counts["busy"] += 1
            log.info("another transaction is in the way; tried again soon", extra=naming(job.work.message))
            return max(BUSY.delay_s(1), retry_after_s(error))
        if is_database_away(error):
            return self._database.pause_s(error)
        self._counts["unwritten"] += 1
        log.error("nothing could be written down; tried again", extra=naming(job.work.message), exc_info=error)
        return UNWRITTEN.delay_s(1)
