"""Publishes to RabbitMQ: pipelined, confirmed, mandatory, persistent.

Confirms are matched by delivery tag, returns by message id. The channel is py-amqp's own without its
`confirm_publish`, which waits for every confirm and takes any confirm for the one that it waits for. After
any exception the connection is thrown away: what had no confirm by then is unknown.
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, Any

from outbox.broker.errors import CHANNEL_CLOSED, LOST, describe, is_unexplained
from outbox.errors import BrokerUnavailable
from outbox.publishers.base import Published
from outbox.publishers.brought import BroughtQueues
from outbox.publishers.confirms import Confirms
from outbox.publishers.connection import BrokerConnection
from outbox.publishers.deadends import DeadEnds
from outbox.publishers.flight import Flight
from outbox.publishers.suspects import Suspects
from outbox.publishers.wire_message import CannotSerialize, address, prepare
from outbox.states import Outcome, Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox.outgoing import Outgoing
    from outbox.publishers.base import Control
    from outbox.routes import Routes

WINDOW_MESSAGES = 500
WINDOW_BYTES = 1_000_000  # what a blocked connection may hold in kernel buffers unseen; see README, "Settings"
CONFIRM_TIMEOUT_S = 20.0
_POLL_S = 0.2


class RabbitMQPublisher:
    """Implements `Publisher` for `amqp://` and `amqps://`.

    `window` messages, and about one megabyte, are in flight at most. When nothing at all is confirmed for
    `confirm_timeout_s` seconds the connection counts as lost, unless the broker said that it is blocked.
    """

    def __init__(
        self, url: str, routes: Routes, *, window: int = WINDOW_MESSAGES, confirm_timeout_s: float = CONFIRM_TIMEOUT_S
    ) -> None:
        self.routes = routes
        self.window = window
        self.confirm_timeout_s = confirm_timeout_s
        self._broker = BrokerConnection(url, routes, on_blocked=self._on_blocked, on_unblocked=self._on_unblocked)
        self._blocked = False
        self._confirms: Confirms | None = None
        self._suspects = Suspects()
        self._dead_ends = DeadEnds(routes)
        self._queues = BroughtQueues()

    @property
    def blocked(self) -> bool:
        """The broker has raised a memory or disk alarm and reads nothing from us."""
        return self._blocked

    def connect(self) -> None:
        """Connect, declare the routes' exchanges and queues, and turn confirms on, if not connected."""
        if self._confirms is not None:
            return
        self._blocked = False
        self._queues = BroughtQueues()
        try:
            channel = self._broker.open()
            channel.confirm_select()
        except BrokerUnavailable:
            self._suspects.away()
            raise
        except LOST as error:
            self._suspects.away()
            self._drop()
            raise BrokerUnavailable(describe(error)) from error
        self._confirms = Confirms(channel)
        self._suspects.works()

    def close(self) -> None:
        """Close the connection; may be called twice."""
        if self._confirms is not None and not self._blocked:
            self._broker.close()
        self._drop()

    def _drop(self) -> None:
        self._confirms = None
        self._broker.drop()

    def tick(self) -> None:
        """Answer heartbeats and notice a lost or blocked connection while there is nothing to publish."""
        if self._confirms is None:
            return
        try:
            while self._drain(0):
                pass
            self._broker.heartbeat()
        except LOST as error:
            self._drop()
            raise BrokerUnavailable(describe(error)) from error

    def publish(self, rows: Sequence[Outgoing], control: Control) -> Published:
        """Publish a batch; see `Publisher`."""
        flight = Flight(rows, suspects=self._suspects.alone)
        lost: BrokerUnavailable | None = None
        try:
            self._declare(rows)
            self._deliver(flight, control)
        except BrokerUnavailable as error:
            lost = error
        except LOST as error:
            lost = BrokerUnavailable(describe(error))
            if is_unexplained(error):
                self._suspects.lost(flight.unknown)
        if lost or flight.on_wire:
            self._drop()  # a confirm that comes later must not be taken for one of the next batch
        verdicts = flight.end()
        self._suspects.answered(rows, verdicts)
        self._dead_ends.answered(rows, verdicts, through=flight.through)
        return Published(verdicts, lost)

    def _declare(self, rows: Sequence[Outgoing]) -> None:
        """Declare the queues that messages bring along. While nothing is on the wire, so that an error is about a queue."""
        if self._confirms is not None:
            for queue in self._queues.missing(rows):
                self._broker.declare(queue)

    def _deliver(self, flight: Flight, control: Control) -> None:
        while True:
            try:
                return self._send_all(flight, control)
            except CHANNEL_CLOSED:
                if not self._isolate(flight, control):
                    raise

    def _send_all(self, flight: Flight, control: Control) -> None:
        """Send everything, the suspects last: none of their neighbours shall go down with them."""
        self._pipeline(flight, control, window=self.window)
        while flight.aside and not flight.on_wire and control.may_send():
            verdict = self._suspects.judge(flight.call_suspect())
            if verdict is not None:
                flight.failed(verdict)
            else:
                self._pipeline(flight, control, window=1, most=1)
            self._pipeline(flight, control, window=self.window)  # what has waited behind it

    def _pipeline(self, flight: Flight, control: Control, *, window: int, most: int | None = None) -> None:
        confirms = self._confirms
        if confirms is None:
            message = "broker: not connected"
            raise BrokerUnavailable(message)
        confirms.begin(flight, control)
        sent = 0
        while True:
            while self._may_send(flight, control, window) and (most is None or sent < most):
                sent += self._burst(flight, confirms, window=window, most=most)
            paused = self._blocked and flight.waiting and control.may_send()
            if not (flight.on_wire or paused) or not control.may_wait():
                return
            self._wait(confirms, control)

    def _may_send(self, flight: Flight, control: Control, window: int) -> bool:
        return _has_room(flight, window) and not self._blocked and control.may_send()

    def _burst(self, flight: Flight, confirms: Confirms, *, window: int, most: int | None) -> int:
        """Send some messages in one write, and handle what the broker has said meanwhile; return how many."""
        sent = 0
        while _has_room(flight, window) and not confirms.full and (most is None or sent < most):
            sent += self._gather(flight, confirms)
        confirms.flush()
        self._drain(0)
        return sent

    def _gather(self, flight: Flight, confirms: Confirms) -> int:
        row = flight.head
        try:
            exchange, routing_key = address(row, self.routes)
            message = prepare(row, self.routes, routing_key=routing_key, frame_max=self._broker.frame_max)
        except CannotSerialize as error:
            flight.failed(Verdict(Outcome.UNPUBLISHABLE, str(error), "CannotSerialize"))
            return 0
        if self._dead_ends.at(row, (exchange, routing_key)) and flight.follow((exchange, routing_key)):
            return 0
        confirms.gather(message, exchange=exchange, routing_key=routing_key)
        return 1

    def _wait(self, confirms: Confirms, control: Control) -> None:
        if self._drain(_POLL_S):
            return
        self._broker.heartbeat()
        if self._blocked:
            control.progress()  # the broker is alive and has asked us to wait: not a reason to lose the lease
            confirms.heard_at = monotonic()
        elif monotonic() - confirms.heard_at > self.confirm_timeout_s:
            message = f"broker: no confirm for {self.confirm_timeout_s:g} s"
            raise BrokerUnavailable(message)

    def _drain(self, timeout_s: float) -> bool:
        """Handle what the broker has sent; tell whether there was anything."""
        try:
            self._broker.drain(timeout_s)
        except TimeoutError as error:
            if error.errno is not None:  # ETIMEDOUT: the socket itself is dead, not our patience
                raise
            return False
        return True

    def _isolate(self, flight: Flight, control: Control) -> bool:
        """Find what made the broker close the channel: send again, one at a time, what was in flight.

        The error itself names no message. Tells whether any was found.
        """
        found = False
        self._drop()
        for _ in flight.take_unknown():
            self.connect()
            try:
                self._pipeline(flight, control, window=1, most=1)
            except CHANNEL_CLOSED as error:
                self._drop()
                found = bool(flight.take_unknown())
                if not found:
                    raise
                flight.failed(Verdict(Outcome.REJECTED, describe(error), type(error).__name__))
                control.progress()  # the broker has answered, if not with a confirm
        self.connect()
        return found

    def _on_blocked(self, _reason: Any) -> None:
        self._blocked = True

    def _on_unblocked(self) -> None:
        self._blocked = False


def _has_room(flight: Flight, window: int) -> bool:
    return flight.waiting and flight.on_wire < window and flight.wire_bytes < WINDOW_BYTES
