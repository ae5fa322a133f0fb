"""One connection to the broker, from the first delivery to the end: used by one thread, and never again once lost."""

from __future__ import annotations

import errno
import selectors
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any

import kombu

from outbox.broker.dial import HEARTBEAT_S, connected, hang_up, is_amqp
from outbox.broker.errors import LOST, failure
from outbox.errors import BrokerUnavailable
from outbox.inbox.topology import declare

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from outbox.inbox.inbox import Inbox
    from outbox.waker import Waker

_READ_S = 0.05  # how long the rest of a frame may hold up acknowledgements; then reading goes on at the next wait


@dataclass(frozen=True, slots=True, eq=False)
class Delivery:
    """One message as received, and the link that it must be acknowledged on. `error`: kombu could not unpack it."""

    link: Link
    received: kombu.Message
    error: Exception | None = None


class Link:
    """Consumes the inbox's queue; hands each delivery to `on_delivery` inside `wait`.

    Every method but `close` raises `BrokerUnavailable` when the connection is lost; opening it raises
    `BrokerRefused` when the broker says no. Not thread safe.
    """

    def __init__(
        self,
        connection: kombu.Connection,
        inbox: Inbox,
        *,
        prefetch: int,
        waker: Waker,
        on_delivery: Callable[[Delivery], None],
    ) -> None:
        self._connection = connection
        self._waker = waker
        self._on_delivery = on_delivery
        self._ordered = inbox.ordered
        self._selector = selectors.DefaultSelector()
        self._selector.register(waker, selectors.EVENT_READ)
        self._opened_at = self._beat_at = monotonic()
        self._amqp: Any = None
        self.alive = True
        try:
            with self._broker():
                self._open(inbox, prefetch)
        except BrokerUnavailable:
            self.close()
            raise

    def _open(self, inbox: Inbox, prefetch: int) -> None:
        self._connection.ensure_connection(max_retries=0, reraise_as_library_errors=False)
        if is_amqp(self._connection):
            self._amqp = self._connection.connection
            connected(self._amqp)
        channel = self._connection.channel()
        channel.auto_decode = False  # py-amqp would turn the payload into text
        declare(self._connection, channel, inbox)
        self._socket: Any = self._amqp.sock if self._amqp is not None else None
        if self._socket is not None:
            self._selector.register(self._socket, selectors.EVENT_READ)
        self._consumer = kombu.Consumer(
            channel,
            [kombu.Queue(inbox.queue)],
            auto_declare=False,
            prefetch_count=prefetch,
            on_message=lambda received: self._deliver(received, None),
            on_decode_error=self._deliver,
        )
        self._consumer.consume()

    @property
    def age_s(self) -> float:
        """How long ago it was opened, in seconds."""
        return monotonic() - self._opened_at

    def wait(self, timeout_s: float) -> None:
        """Wait for a delivery, for the waker, or for the time to pass; keep the connection alive meanwhile."""
        with self._broker():
            if self._socket is None:
                self._poll(timeout_s)
            elif self._ready(timeout_s):
                self._drain(_READ_S)
            self._heartbeat()

    def ack(self, delivery: Delivery) -> None:
        """Acknowledge a delivery of this link; one of an earlier link is left alone, the broker has requeued it."""
        if delivery.link is self and self.alive:
            with self._broker():
                delivery.received.ack()

    def cancel(self) -> None:
        """Take no further deliveries; those received can still be acknowledged.

        Of an ordered queue it stays the consumer until it is closed: the one that stands by would be given what follows while
        this one still holds what comes before, and only the close does both at once, give that back and make room.
        """
        self._on_delivery = lambda _delivery: None
        if not self._ordered:
            with self._broker():
                self._consumer.cancel()

    def close(self) -> None:
        """Close the connection: the broker requeues what was not acknowledged. Does not raise."""
        alive, self.alive = self.alive, False
        self._selector.close()
        if not alive and self._amqp is not None:
            hang_up(self._amqp)
        with suppress(*self._errors):
            if alive:
                self._connection.close()
            else:
                self._connection.collect()

    def _deliver(self, received: kombu.Message, error: Exception | None) -> None:
        self._on_delivery(Delivery(self, received, error))

    def _ready(self, timeout_s: float) -> bool:
        # TLS may hold a decrypted frame that the socket no longer shows.
        pending = getattr(self._socket, "pending", None)
        if pending is not None and pending():
            return True
        ready = [key.fileobj for key, _ in self._selector.select(timeout_s)]
        if self._waker in ready:
            self._waker.clear()
        return self._socket in ready

    def _poll(self, timeout_s: float) -> None:
        if not self._drain(0) and self._selector.select(timeout_s):
            self._waker.clear()

    def _drain(self, timeout_s: float) -> bool:
        try:
            self._connection.drain_events(timeout=timeout_s)
        except TimeoutError as error:
            if error.errno == errno.ETIMEDOUT:  # the kernel's: the connection is dead
                raise
            return False
        return True

    def _heartbeat(self) -> None:
        if self._connection.supports_heartbeats and monotonic() - self._beat_at > HEARTBEAT_S / 4:
            self._beat_at = monotonic()
            self._connection.heartbeat_check()

    @property
    def _errors(self) -> tuple[type[BaseException], ...]:
        return (*LOST, *self._connection.connection_errors, *self._connection.channel_errors)

    @contextmanager
    def _broker(self) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            self.alive = False
            raise failure(error) from error
