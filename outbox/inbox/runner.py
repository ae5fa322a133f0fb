"""Runs an inbox on its queue: takes deliveries, has them handled by workers, acknowledges them after the COMMIT."""

from __future__ import annotations

import logging
import math
from collections import Counter
from contextlib import closing
from time import monotonic
from typing import TYPE_CHECKING

from outbox import urls
from outbox.broker.dial import Dialler
from outbox.errors import BrokerRefused, BrokerUnavailable, ConfigurationError, OutboxError
from outbox.inbox.flow import Flow
from outbox.inbox.link import Link
from outbox.inbox.processing import processing
from outbox.inbox.room import require_room
from outbox.observe.logs import logged
from outbox.outage import Outage
from outbox.telemetry import BreakerChanged, BrokerStateChanged
from outbox.tracing.server import server_of
from outbox.vitals import Vitals
from outbox.waker import Waker

if TYPE_CHECKING:
    import threading

    from outbox.inbox.inbox import Inbox
    from outbox.inbox.processing import Run
    from outbox.store.failed_stats import FailedCounts
    from outbox.telemetry import Telemetry

log = logging.getLogger("outbox.inbox")

STABLE_S = 1.0  # a connection that lives so long is a good one: until then, failures go on counting
_AHEAD = 20  # a quorum queue hands out more in batches: with 1 or 2 ahead it gave 550 messages/s, with 16 or more 2,200
HANGS_S = 30.0  # how long the loop may be without a turn before it counts as hung
TICK_S = 0.2  # how soon a stop is noticed


class Runner:
    """Consumes an inbox's queue until told to stop.

    `workers` handlers run at the same time, each on a database connection of its own (the pool must have two more, for what
    is written down besides). Up to `prefetch` deliveries (default: 20 more than workers) are taken from the broker at a time. Set
    it to the number of workers when handlers are slow, so that one consumer does not keep from others what it cannot handle
    yet. `grace_s` is how long running handlers may take after the stop, in seconds. `vitals` is where it notes how it is:
    a handler that hangs on after it was given up counts as hung until it ends. `telemetry` is told of every step (default: it
    is logged).

    Guaranteed: a delivery is acknowledged only after the COMMIT of its effects, or of what its failure leads to. It is
    delivered again after a crash at any instant, and its effects are not repeated (on brokers that lose no messages: kombu's
    SQLAlchemy and Redis transports can lose what a process has in its hands when it is killed). A failing message never
    stands in the way: it moves into the table of failed messages, from where it is tried again when it is due, by at most half
    of the workers. While the database is away nothing is acknowledged and no try counted. Not guaranteed: the order of
    messages, unless the inbox is `ordered`.

    Raises `ConfigurationError` for settings that cannot work.
    """

    def __init__(
        self,
        inbox: Inbox,
        broker_url: str,
        *,
        workers: int = 1,
        prefetch: int | None = None,
        grace_s: float = 25.0,
        vitals: Vitals | None = None,
        telemetry: Telemetry | None = None,
    ) -> None:
        if workers < 1:
            raise ConfigurationError(f"workers must be at least 1, not {workers}")
        if prefetch is not None and prefetch < workers:
            raise ConfigurationError(
                f"prefetch must be at least as many as workers, or some never have anything to do: {prefetch} < {workers}"
            )
        if not 0 <= grace_s < math.inf:
            raise ConfigurationError(f"grace must be a number of zero or more, not {grace_s}")
        if not inbox.patterns:
            raise ConfigurationError(
                f"inbox {inbox.consumer!r} has no handlers; register some, such as with @inbox.transactional"
            )
        require_room(inbox, workers=workers)
        self._inbox = inbox
        self._dialler = Dialler(broker_url)
        inbox.messaging_system = server_of(urls.current(broker_url)).system
        self._threads = workers
        self._prefetch = prefetch or workers + _AHEAD
        self._grace_s = grace_s
        self.counts: Counter[str] = Counter()
        """How many tries came to each `Result` so far; `busy` ones found another transaction in the way."""
        self._telemetry = telemetry or logged()
        changed = lambda error: self._telemetry.emit(BreakerChanged(error is not None, error))  # noqa: E731 - it is nothing more
        self._outage = Outage(log, "broker", on_change=changed)
        self._was_connected = False
        self._found: str | None = None
        self._vitals = vitals or Vitals(limit_s=HANGS_S)
        self._flow: Flow | None = None

    def run(self, stop: threading.Event) -> None:
        """Consume until `stop` is set, reconnecting for as long as it takes; then finish what is running and return.

        Raises `BrokerRefused` when the very first connection is refused: wrong password, no such virtual host,
        an exchange of another type. A broker that is merely away is waited for. To be called once.
        """
        with (
            Waker() as waker,
            processing(self._inbox) as run,
            self._new_flow(run, waker) as self._flow,
        ):
            flow = self._flow
            deadline = self._consume(stop, waker, flow)
            flow.stop()
            flow.join(deadline)
            if flow.unfinished:
                log.warning("handlers are still running; left to be redelivered", extra={"handlers": flow.unfinished})
        log.info("stopped", extra={"consumer": self._inbox.consumer, **self.counts})

    def check(self) -> None:
        """Raise what keeps it from being ready, for a probe: the database is away, or has other tables. In any thread."""
        if self._flow is None:
            raise OutboxError("not consuming yet")
        self._flow.check()

    def look(self) -> FailedCounts:
        """Count the consumer's failed messages, for metrics: each state up to a bound. In any thread. Raises what `check` does."""
        if self._flow is None:
            raise OutboxError("not consuming yet")
        return self._flow.look()

    def _new_flow(self, run: Run, waker: Waker) -> Flow:
        self._vitals.at_work.set()
        return Flow(
            self._inbox,
            run,
            counts=self.counts,
            progress=self._vitals.progress,
            threads=self._threads,
            wake=waker.wake,
            telemetry=self._telemetry,
        )

    def _consume(self, stop: threading.Event, waker: Waker, flow: Flow) -> float:
        deadline = None
        while not stop.is_set():
            try:
                with closing(self._open(waker, flow)) as link:
                    self._serve(link, flow, stop)
                    deadline = monotonic() + self._grace_s
                    self._finish(link, flow, deadline)
            except BrokerUnavailable as error:
                if isinstance(error, BrokerRefused) and not self._was_connected:
                    raise
                self._note_broker("unreachable")
                self._wait_for_broker(stop, flow, self._outage.pause_s(error))
        return deadline or monotonic() + self._grace_s

    def _wait_for_broker(self, stop: threading.Event, flow: Flow, pause_s: float) -> None:
        """Go on with what has failed before and is due: that needs no broker."""
        until = monotonic() + pause_s
        while not stop.is_set() and (left_s := until - monotonic()) > 0:
            self._vitals.progress.note("waiting for the broker", rest_s=left_s)
            stop.wait(min(TICK_S, left_s))
            flow.turn()

    def _open(self, waker: Waker, flow: Flow) -> Link:
        self._vitals.progress.note("connecting to the broker")
        try:
            link = Link(self._dialler.connection(), self._inbox, prefetch=self._prefetch, waker=waker, on_delivery=flow.deliver)
        except BrokerUnavailable:
            self._dialler.failed()
            raise
        if not self._was_connected:
            self._was_connected = True
            log.info("consuming", extra={"consumer": self._inbox.consumer, "queue": self._inbox.queue})
        self._vitals.started.set()
        self._note_broker("connected")
        return link

    def _note_broker(self, state: str) -> None:
        self._vitals.trouble("broker", None if state == "connected" else state)
        if state != self._found:
            self._found = state
            self._telemetry.emit(BrokerStateChanged(state))

    def _serve(self, link: Link, flow: Flow, stop: threading.Event) -> None:
        while not stop.is_set():
            self._vitals.progress.note("waiting for messages")
            link.wait(flow.wait_s(at_most=TICK_S))
            flow.turn()
            if link.age_s > STABLE_S:
                self._outage.over()

    def _finish(self, link: Link, flow: Flow, deadline: float) -> None:
        link.cancel()
        flow.stop()
        log.info("finishing what is running", extra={"handlers": flow.unfinished})
        while flow.unfinished and monotonic() < deadline:
            self._vitals.progress.note("finishing what is running")
            link.wait(min(TICK_S, max(0.0, deadline - monotonic())))
            flow.turn()
