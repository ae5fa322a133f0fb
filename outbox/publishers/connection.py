"""One connection to RabbitMQ with one channel, on which the routes are declared."""

from __future__ import annotations

import logging
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any

from outbox.broker.dial import HEARTBEAT_S, Dialler, connected, hang_up
from outbox.broker.errors import CHANNEL_CLOSED, LOST, describe, failure
from outbox.errors import BrokerUnavailable
from outbox.publishers.declare import declare
from outbox.publishers.inbound import handle

if TYPE_CHECKING:
    from collections.abc import Callable

    import amqp
    import kombu

    from outbox.routes import Routes

log = logging.getLogger("outbox.publishers")

_GOODBYE_S = 1.0


class BrokerConnection:
    """Opens one connection at a time, without kombu's own retries: whether to try again is for the relay to say."""

    def __init__(self, url: str, routes: Routes, *, on_blocked: Callable[[Any], None], on_unblocked: Callable[[], None]) -> None:
        self._routes = routes
        self._dialler = Dialler(url, on_blocked=on_blocked, on_unblocked=on_unblocked)
        self._amqp: amqp.Connection | None = None
        self._beat_at = 0.0

    @property
    def frame_max(self) -> int:
        """The largest frame, in bytes, that the broker takes."""
        return int(self._amqp.frame_max) if self._amqp else 131_072

    def open(self) -> amqp.Channel:
        """Connect, declare, and return a new channel. Raises `BrokerRefused` or `BrokerUnavailable`."""
        self.drop()
        try:
            self._amqp = self._dialler.connection().transport.establish_connection()
            connected(self._amqp)
            channel = self._amqp.channel()
            declare(self._amqp, channel, self._routes, amqp=True)
        except LOST as error:
            self.drop()
            self._dialler.failed()
            raise failure(error) from error
        return channel

    def declare(self, queue: kombu.Queue) -> None:
        """Declare a queue that a message brought along, with its exchange and bindings, on a channel of its own.

        One that exists in another way is used as it is: whether messages get there is for the broker to say.
        """
        if self._amqp is None:
            raise BrokerUnavailable("broker: not connected")
        channel = self._amqp.channel()
        try:
            queue(channel).declare()
        except CHANNEL_CLOSED as error:
            log.warning("cannot declare a queue as asked for", extra={"queue": queue.name, "error": describe(error)})
        finally:
            channel.close()

    def drain(self, timeout_s: float) -> None:
        """Handle what the broker has sent. Raises `TimeoutError` if there is nothing for so long."""
        if self._amqp is None:
            raise BrokerUnavailable("broker: not connected")
        handle(self._amqp, timeout_s=timeout_s)

    def heartbeat(self) -> None:
        """Send a heartbeat when one is due; raise if the broker has been silent for too long."""
        if self._amqp is not None and monotonic() - self._beat_at >= HEARTBEAT_S / 8:
            self._beat_at = monotonic()
            self._amqp.heartbeat_tick()

    def close(self) -> None:
        """Close in good order, or a broker reports a client that vanished; wait for its answer, but not for long."""
        if self._amqp is not None:
            with suppress(*LOST):
                self._amqp.sock.settimeout(_GOODBYE_S)
                self._amqp.close()
        self.drop()

    def drop(self) -> None:
        """Close the socket of a connection that may be lost, or in the middle of a frame."""
        connection, self._amqp = self._amqp, None
        if connection is not None:
            hang_up(connection)
