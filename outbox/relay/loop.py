"""The relay's loop: claim, publish, settle, wait."""

from __future__ import annotations

import logging
import math
import random
from typing import TYPE_CHECKING, NamedTuple

from sqlalchemy.exc import SQLAlchemyError

from outbox import clock
from outbox.errors import BrokerRefused, BrokerUnavailable
from outbox.observe.logs import logged
from outbox.outage import Outage
from outbox.points import Point, reached
from outbox.relay.batch import Delivered, Lease
from outbox.relay.turnover import Turnover
from outbox.states import Outcome
from outbox.store.registry import Broker
from outbox.telemetry import (
    BatchClaimed,
    BatchPublished,
    BreakerChanged,
    BrokerStateChanged,
    LeaseRenewed,
    PublishBegan,
)
from outbox.tracing.sending import sending
from outbox.tracing.server import Server
from outbox.vitals import Vitals

if TYPE_CHECKING:
    from collections.abc import Mapping

    from outbox.publishers.base import Published, Publisher
    from outbox.relay.batch import Batch
    from outbox.relay.cleanup import Cleanup
    from outbox.relay.presence import Presence
    from outbox.relay.registry import Registry
    from outbox.relay.stopping import Stopping
    from outbox.relay.transactions import Transactions
    from outbox.telemetry import Telemetry

log = logging.getLogger("outbox.relay")

_FIRST_PAUSE_S = 0.01
_TICK_S = 5.0  # a connection to the broker wants to be looked after more often than its heartbeat, whatever the poll interval is
_BLOCKED_S = 0.5
_PUBLISHING = "publishing to the broker"


class Pause(NamedTuple):
    """How long to wait before the next turn, and whether a wake-up may end it: not while a server is away."""

    seconds: float
    ends_at_wake: bool = False


class Relay:
    """Publishes what was committed until it is asked to stop.

    Guarantees: what it records as sent, the broker has confirmed. Messages of one key are published in id order, and a
    relay that has lost its lease writes nothing. Not guaranteed: that a message is published only once. A crash between
    publish and settle publishes that batch again, under the same message ids. `telemetry` is told of every step (default: it
    is logged).
    """

    def __init__(
        self,
        transactions: Transactions,
        publisher: Publisher,
        stopping: Stopping,
        *,
        lease_s: float,
        poll_interval_s: float,
        cleanup: Cleanup | None = None,
        registry: Registry | None = None,
        vitals: Vitals | None = None,
        presence: Presence | None = None,
        ahead_from: float = math.inf,
        server: Server | None = None,
        telemetry: Telemetry | None = None,
    ) -> None:
        self._transactions = transactions
        self._publisher = publisher
        self._stopping = stopping
        self._lease_s = lease_s
        self._poll_interval_s = poll_interval_s
        self._cleanup = cleanup
        self._registry = registry
        self._presence = presence
        self._server = server or Server()
        self._vitals = vitals or Vitals(limit_s=lease_s)
        self._progress = self._vitals.progress
        self._ahead_from = ahead_from
        self._empty_polls = 0
        self._met_broker = False
        self._emit = (telemetry or logged()).emit
        self._turnover = Turnover(transactions, stopping, self._progress, self._emit)
        self._broker = Outage(log, "broker", on_change=lambda error: self._emit(BreakerChanged(error is not None, error)))
        self._found: Broker | None = None

    def run(self) -> None:
        """Run until asked to stop; then finish what is in flight, give the leases back, and return.

        Goes on through outages of the database and the broker for as long as they take. Raises `BrokerRefused` if the
        broker says no the first time that it answers.
        """
        self._vitals.at_work.set()
        try:
            while not self._stopping.asked:
                pause = self._turn()
                self._clean_up()
                self._wait(pause)
            self._turnover.give_back()
        finally:
            self._turnover.close()
            self._publisher.close()

    def _wait(self, pause: Pause) -> None:
        """Wait for the next turn; a long pause in stretches, between which the connection to the broker is looked after."""
        left_s = pause.seconds
        while True:
            stretch_s = min(left_s, _TICK_S)
            left_s -= stretch_s
            self._progress.note("waiting", rest_s=stretch_s)
            if pause.ends_at_wake:
                woken = self._stopping.idle(stretch_s)
            else:
                self._stopping.wait(stretch_s)
                woken = False
            if woken or left_s <= 0 or self._stopping.asked or not self._tend():
                return

    def _tend(self) -> bool:
        """Do, in a long pause, what else there is to do between polls; tell whether the broker is still there."""
        try:
            self._publisher.tick()
        except BrokerUnavailable:
            return False  # the next turn connects anew
        self._note_broker()
        self._clean_up()
        return True

    def _clean_up(self) -> None:
        if self._cleanup is not None and not self._stopping.asked:
            self._progress.note("cleaning up")
            self._cleanup.turn()

    def _turn(self) -> Pause:
        """Do what there is to do; return how long to wait before the next turn."""
        self._progress.note("connecting to the broker")
        try:
            self._publisher.connect()
            self._met_broker = True
            self._publisher.tick()
        except BrokerUnavailable as error:
            if isinstance(error, BrokerRefused) and not self._met_broker:
                raise
            self._note(Broker.UNREACHABLE)
            self._turnover.give_back()
            return Pause(self._broker.pause_s(error))
        self._note_trouble()
        if self._publisher.blocked:
            self._note_broker()
            self._vitals.started.set()
            return Pause(min(self._poll_interval_s, _BLOCKED_S))
        try:
            batch = self._turnover.next()
        except SQLAlchemyError as error:
            return Pause(self._turnover.database.pause_s(error))
        self._vitals.started.set()
        if batch is None:
            self._broker.over()
            self._note_broker()  # not before the claim: what is waiting to be published does not wait for this
            return self._idle()
        reached(Point.AFTER_CLAIM)
        self._emit(BatchClaimed(len(batch.rows), batch.set_aside, len(batch.leases), batch.seconds))
        return self._deliver(batch)

    def _deliver(self, batch: Batch) -> Pause:
        self._progress.note(_PUBLISHING)
        if len(batch.rows) >= self._ahead_from:
            self._turnover.begin_ahead()
        lease = Lease(
            batch,
            self._stopping,
            lease_s=self._lease_s,
            renew=self._renew,
            on_progress=self._note_answer,
            intact=self._presence.intact if self._presence is not None else lambda: True,
        )
        published = self._publish(batch, lease)
        self._turnover.take_ahead()
        reached(Point.BEFORE_SETTLE)
        look = self._may_look(batch, published)
        self._turnover.settle(Delivered(batch, published.verdicts), and_claim=look)
        if published.lost is not None:
            self._turnover.give_back()
            if any(verdict.outcome is Outcome.CONFIRMED for verdict in published.verdicts.values()):
                self._broker.over()  # it is there: pauses that grow would hold up the neighbours of what breaks the connection
            return Pause(self._broker.pause_s(published.lost))
        self._broker.over()
        self._note_broker()
        return self._next(batch, looked=look)

    def _may_look(self, batch: Batch, published: Published) -> bool:
        """Tell whether to claim the next batch in the transaction that settles this one."""
        stays = published.lost is None and not self._publisher.blocked and not self._stopping.asked
        return bool(batch.rows) and stays and not self._turnover.has_next()

    def _publish(self, batch: Batch, lease: Lease) -> Published:
        if not batch.rows:
            return self._publisher.publish(batch.rows, lease)
        self._emit(PublishBegan(batch.rows))
        began = clock.seconds()
        with sending(batch.rows, self._server) as sent:
            published = self._publisher.publish(batch.rows, lease)
            sent.verdicts, sent.lost = published.verdicts, published.lost
        now = clock.seconds()
        self._emit(BatchPublished(batch.rows, published.verdicts, now - began, now - batch.claimed_at, published.lost))
        return published

    def _next(self, batch: Batch, *, looked: bool) -> Pause:
        """Return no pause while there is something to publish; `looked`: after the batch, in the transaction that has settled it.

        A claim that only set messages aside has done something that need not be done again, and there may be more to
        publish in the partitions that it did not lease: a short pause, which keeps what arrives for a paused topic from
        being moved one by one. A claim that read nothing at all counts as an idle poll.
        """
        if batch.rows or batch.set_aside:
            self._empty_polls = 0
        if not batch.rows:
            return self._idle()
        self._stopping.found()
        return Pause(0) if self._turnover.has_next() or not looked else self._idle()

    def _renew(self, leases: Mapping[int, int]) -> set[int]:
        self._progress.note("renewing leases in the database")
        held = self._transactions.renew(leases)
        self._emit(LeaseRenewed(len(leases), len(held)))
        self._progress.note(_PUBLISHING)
        return held

    def _note_answer(self) -> None:
        self._progress.note(_PUBLISHING)
        self._note_broker()

    def _note_broker(self) -> None:
        self._note(self._state_of_broker())

    def _note(self, broker: Broker) -> None:
        self._note_trouble(broker)
        if self._registry is not None:
            self._registry.note(broker)

    def _note_trouble(self, broker: Broker | None = None) -> None:
        broker = broker or self._state_of_broker()
        if broker is not self._found:
            self._found = broker
            self._emit(BrokerStateChanged(broker))
        self._vitals.trouble("broker", None if broker is Broker.CONNECTED else broker.value)

    def _state_of_broker(self) -> Broker:
        return Broker.BLOCKED if self._publisher.blocked else Broker.CONNECTED

    def _idle(self) -> Pause:
        """Return a pause that doubles while there is nothing to do, with jitter so that relays do not poll in step.

        A relay that will be woken looks once more soon, and then leaves it at the poll interval.
        """
        self._empty_polls += 1
        doublings = 20 if self._stopping.hears and self._empty_polls > 1 else min(self._empty_polls, 20)
        pause_s: float = min(self._poll_interval_s, _FIRST_PAUSE_S * 2**doublings) * random.uniform(0.75, 1.0)
        if self._presence is not None:
            pause_s = min(pause_s, self._presence.wait_s)
        return Pause(pause_s, ends_at_wake=True)
