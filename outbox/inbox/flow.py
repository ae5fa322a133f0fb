"""The way of messages through a consumer: in from the broker and from the failed ones, to the workers, and out again."""

from __future__ import annotations

import logging
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, Self

from sqlalchemy.exc import SQLAlchemyError

from outbox.backoff import Backoff
from outbox.inbox.errors import HandlersStuck
from outbox.inbox.jobs import Finished, Job, from_delivery
from outbox.inbox.keys import Keys
from outbox.inbox.receiving import Receiver
from outbox.inbox.retrier import Retrier
from outbox.inbox.settling import Settler
from outbox.inbox.workers import Workers
from outbox.mention import mentioned
from outbox.outage import Outage
from outbox.telemetry import DatabaseStateChanged

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable

    from outbox.inbox.inbox import Inbox, Result
    from outbox.inbox.link import Delivery
    from outbox.inbox.processing import Run
    from outbox.inbox.receiving import Work
    from outbox.progress import Progress
    from outbox.store.failed_stats import FailedCounts
    from outbox.telemetry import Telemetry

log = logging.getLogger("outbox.inbox")

DATABASE_AWAY = Backoff(first_s=0.5, ceiling_s=5, floor=0.5)
_MOST_STUCK = 10
_LAST_WORDS_S = 2.0
_MARGIN_S = 5.0


class Flow:
    """A context manager; all methods are for the thread that owns the link to the broker."""

    def __init__(
        self,
        inbox: Inbox,
        run: Run,
        *,
        counts: Counter[str],
        progress: Progress,
        threads: int,
        wake: Callable[[], None],
        telemetry: Telemetry,
    ) -> None:
        self._inbox = inbox
        self._progress = progress
        changed = lambda error: telemetry.emit(DatabaseStateChanged(error is None, error))  # noqa: E731 - it is nothing more
        database = Outage(log, "database", DATABASE_AWAY, on_change=changed)
        self._receiver = Receiver(inbox, telemetry)
        self._run = run
        self._settler = Settler(counts, database)
        self._stopping = False
        self._keys = Keys() if inbox.ordered else None
        self._most_stuck = max(_MOST_STUCK, threads)
        self._workers = Workers(self._handle, threads=threads, wake=wake)
        self._retrier = Retrier(lambda most: run(self._receiver.claim, most), database, most=max(1, threads // 2), wake=wake)

    @property
    def unfinished(self) -> int:
        """How many messages are in the workers' hands."""
        return self._workers.unfinished

    def deliver(self, delivery: Delivery) -> None:
        """Have a delivery handled."""
        self._submit(from_delivery(delivery))

    def turn(self) -> None:
        """Take every step that is due. Raises `BrokerUnavailable`, and `HandlersStuck` when hardly a thread is left."""
        self._workers.enforce_limits()
        for finished in self._workers.finished():
            self._settle(finished)
        if not self._stopping:
            for job in self._settler.due():
                self._workers.submit(job)
            for work in self._retrier.claimed():
                self._submit(Job(work))
        if self._workers.stuck > self._most_stuck:
            raise HandlersStuck(
                f"{self._workers.stuck} handlers hang past their time limits; this process has to be started again"
            )

    def wait_s(self, *, at_most: float) -> float:
        """Return how long it is, in seconds, until something is due."""
        return self._settler.wait_s(at_most=at_most)

    def check(self) -> None:
        """Ask the database whether it answers and has the tables. Raises what is wrong; callable from any thread."""
        self._run(self._receiver.check)

    def look(self) -> FailedCounts:
        """Count the failed messages by state, each up to a bound; callable from any thread."""
        return self._run(self._receiver.look)

    def stop(self) -> None:
        """Begin on nothing new, and give back what was claimed and not begun."""
        self._stopping = True
        self._retrier.stop()
        dropped = self._workers.drop_waiting() + (self._keys.drop() if self._keys else [])
        claimed = [job.work for job in dropped if job.work.claimed] + list(self._retrier.claimed())
        if claimed:
            thread = threading.Thread(target=self._give_back, args=(claimed,), name="outbox-consume-return", daemon=True)
            thread.start()
            thread.join(_LAST_WORDS_S)  # a database that is away does not hold up the stop

    def join(self, deadline: float) -> None:
        """Wait until all has finished or the monotonic clock reaches `deadline`."""
        self._workers.join(deadline)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self._workers)
            stack.enter_context(self._retrier)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _handle(self, job: Job) -> Result:
        with mentioned(job.work.message):
            return self._handle_it(job)

    def _handle_it(self, job: Job) -> Result:
        if job.error is not None:
            return self._run(self._receiver.fail, job.work, job.error)
        message = job.work.message
        limit_s = self._inbox.rules_of(message).time_limit_s + _MARGIN_S  # by then it has been given up, and hangs on
        with self._progress.task(f"handling {message.topic} {message.message_id}", limit_s=limit_s) as task:
            job.guard.on_progress = task.note
            return self._run(self._receiver.receive, job.work, job.guard)

    def _submit(self, job: Job) -> None:
        if self._keys is None or self._keys.admit(job):
            self._workers.submit(job)

    def _settle(self, finished: Finished) -> None:
        ended = True  # also if the broker is lost in here: it delivers the message again
        try:
            ended = self._settler.settle(finished)
        finally:
            if ended:
                self._end(finished.job)

    def _end(self, job: Job) -> None:
        if job.delivery is None:
            self._retrier.done()
        if self._keys is not None and (following := self._keys.done(job)) is not None:
            self._workers.submit(following)

    def _give_back(self, works: list[Work]) -> None:
        try:
            for work in works:
                self._run(self._receiver.give_back, work)
        except SQLAlchemyError as error:
            log.warning("failed messages not given back; due again when their leases are over", extra={"error": str(error)})
