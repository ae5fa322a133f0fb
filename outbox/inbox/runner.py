"""Runs an inbox on its queue: takes deliveries, has them handled by workers, acknowledges them after the COMMIT."""

from __future__ import annotations

import logging
from contextlib import closing
from time import monotonic
from typing import TYPE_CHECKING

from outbox.broker.dial import dial
from outbox.errors import BrokerRefused, BrokerUnavailable, ConfigurationError
from outbox.inbox.link import Link
from outbox.inbox.processing import processing
from outbox.inbox.settling import Settler
from outbox.inbox.waker import Waker
from outbox.inbox.workers import Workers
from outbox.outage import Outage

if TYPE_CHECKING:
    import threading
    from collections import Counter

    from outbox.inbox.inbox import Inbox

log = logging.getLogger("outbox.inbox")

STABLE_S = 1.0  # a connection that lives so long is a good one: until then, failures go on counting
_AHEAD = 20  # a quorum queue hands out more in batches: with 1 or 2 ahead it gave 550 messages/s, with 16 or more 2,200
TICK_S = 0.2  # how soon a stop is noticed


class Runner:
    """Consumes an inbox's queue until told to stop.

    `workers` handlers run at the same time, each on a database connection of its own (the pool must have as many).
    Up to `prefetch` deliveries (default: 20 more than workers) are taken from the broker at a time; a failing one keeps
    its place among them while it waits for its retry. Set it to the number of workers when handlers are slow, so that
    one consumer does not keep from others what it cannot handle yet. For messages strictly in the order of the queue
    set `workers=1, prefetch=1` and run a single consumer: then a failing message holds up all behind it. `grace_s` is
    how long running handlers may take after the stop, in seconds.

    Guaranteed: a delivery is acknowledged only after the COMMIT of its effects. It is delivered again after a crash
    at any instant, and its effects are not repeated (on brokers that lose no messages: kombu's SQLAlchemy and Redis
    transports can lose what a process has in its hands when it is killed). A failed delivery is never dropped: it is
    tried again for ever, after 1 to 60 seconds; a dead-letter policy on the queue does not apply to it. Not
    guaranteed: the order of messages, and a limit on the time that a handler takes (RabbitMQ closes the channel of one
    that takes over 30 minutes; its message is redelivered and found to be a duplicate).

    Raises `ConfigurationError` for settings that cannot work.
    """

    def __init__(
        self, inbox: Inbox, broker_url: str, *, workers: int = 1, prefetch: int | None = None, grace_s: float = 25.0
    ) -> None:
        if workers < 1 or (prefetch is not None and prefetch < workers):
            raise ConfigurationError("workers must be at least 1, and prefetch at least as many as workers")
        if not inbox.patterns:
            raise ConfigurationError(
                f"inbox {inbox.consumer!r} has no handlers; register some, such as with @inbox.transactional"
            )
        self._inbox = inbox
        self._connection = dial(broker_url)
        self._threads = workers
        self._prefetch = prefetch or workers + _AHEAD
        self._grace_s = grace_s
        self._settler = Settler()
        self._outage = Outage(log, "broker")
        self._was_connected = False

    @property
    def counts(self) -> Counter[str]:
        """How many deliveries were `handled`, `duplicate`, `busy` and `failed` so far."""
        return self._settler.counts

    def run(self, stop: threading.Event) -> None:
        """Consume until `stop` is set, reconnecting for as long as it takes; then finish what is running and return.

        Raises `BrokerRefused` when the very first connection is refused: wrong password, no such virtual host,
        an exchange of another type. A broker that is merely away is waited for. To be called once.
        """
        with (
            Waker() as waker,
            processing(self._inbox) as process,
            Workers(process, threads=self._threads, wake=waker.wake) as workers,
        ):
            deadline = self._consume(stop, waker, workers)
            workers.join(deadline)
            if workers.unfinished:
                log.warning("handlers are still running; left to be redelivered", extra={"handlers": workers.unfinished})
        log.info("stopped", extra={"consumer": self._inbox.consumer, **self.counts})

    def _consume(self, stop: threading.Event, waker: Waker, workers: Workers) -> float:
        deadline = None
        while not stop.is_set():
            try:
                with closing(self._open(waker, workers)) as link:
                    self._serve(link, workers, stop)
                    deadline = monotonic() + self._grace_s
                    self._finish(link, workers, deadline)
            except BrokerUnavailable as error:
                if isinstance(error, BrokerRefused) and not self._was_connected:
                    raise
                stop.wait(self._outage.pause_s(error))
        return deadline or monotonic() + self._grace_s

    def _open(self, waker: Waker, workers: Workers) -> Link:
        link = Link(self._connection, self._inbox, prefetch=self._prefetch, waker=waker, on_delivery=workers.submit)
        if not self._was_connected:
            self._was_connected = True
            log.info("consuming", extra={"consumer": self._inbox.consumer, "queue": self._inbox.queue})
        return link

    def _serve(self, link: Link, workers: Workers, stop: threading.Event) -> None:
        while not stop.is_set():
            link.wait(self._settler.wait_s(at_most=TICK_S))
            self._settle(link, workers)
            if link.age_s > STABLE_S:
                self._outage.over()

    def _settle(self, link: Link, workers: Workers) -> None:
        for finished in workers.finished():
            self._settler.settle(finished, link)
        self._settler.requeue_due(link)

    def _finish(self, link: Link, workers: Workers, deadline: float) -> None:
        link.cancel()
        workers.drop_waiting()
        log.info("finishing what is running", extra={"handlers": workers.unfinished})
        while workers.unfinished and monotonic() < deadline:
            link.wait(min(TICK_S, max(0.0, deadline - monotonic())))
            self._settle(link, workers)
