"""Publishes through kombu's virtual transports (Redis, SQLAlchemy, filesystem, ...), one message at a time.

These transports ignore `mandatory` and drop what no queue is bound for, so the bindings are looked up first.
They know bindings of the process that made them, or keep them in the store, depending on the transport: name the
queues in the route (`queues = [...]`), and the relay declares them itself.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kombu.transport import virtual
from sqlalchemy.exc import SQLAlchemyError

from outbox import urls
from outbox.broker.dial import Dialler
from outbox.broker.errors import describe
from outbox.broker.tls import refusal
from outbox.errors import BrokerRefused, BrokerUnavailable, ConfigurationError
from outbox.publishers.base import Published
from outbox.publishers.brought import BroughtQueues
from outbox.publishers.cloudevents import AMQP, KAFKA
from outbox.publishers.deadends import UNROUTABLE
from outbox.publishers.declare import declare
from outbox.publishers.flight import CONFIRMED, Flight
from outbox.publishers.suspects import Suspects
from outbox.publishers.wire_message import CannotSerialize, address, content
from outbox.states import Outcome, Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox.outgoing import Outgoing
    from outbox.publishers.base import Control
    from outbox.routes import Routes


class KombuPublisher:
    """Implements `Publisher`; `confirmed` means what the table in `outbox.publishers.transports` says."""

    blocked = False

    def __init__(self, url: str, routes: Routes) -> None:
        self.routes = routes
        self._dialler = Dialler(url)
        self._kombu = self._dialler.connection()
        self._naming = KAFKA if self._kombu.transport.driver_type == "kafka" else AMQP
        self._channel: Any = None
        self._suspects = Suspects()
        self._queues = BroughtQueues()
        transport = self._kombu.transport
        _require_exchanges(transport, urls.current(url).partition(":")[0], routes)
        self._errors = (*transport.connection_errors, *transport.channel_errors, SQLAlchemyError, OSError)

    def connect(self) -> None:
        """Connect and declare the routes, if not connected."""
        if self._channel is not None:
            return
        self._kombu = self._dialler.connection()
        try:
            self._kombu.connect()  # kombu opens no channel on a connection that was closed before
            channel = self._kombu.channel()
            self._queues = BroughtQueues()
            declare(self._kombu, channel, self.routes, amqp=False)
        except self._errors as error:
            self._suspects.away()
            self.close()
            self._dialler.failed()
            raise self._unavailable(error) from error
        self._channel = channel

    def publish(self, rows: Sequence[Outgoing], control: Control) -> Published:
        """Publish a batch; see `Publisher`. A message whose publish raised is unknown.

        A store may fail at every publish and yet accept connections, so that it works is shown only by a message that
        went through: a message that fails with no other beside it is tried again for as long as it takes.
        """
        flight = Flight(rows, suspects=self._suspects.alone)
        if self._channel is None:
            return Published(flight.end(), BrokerUnavailable("broker: not connected"))
        lost = None
        try:
            for queue in self._queues.missing(rows):
                queue(self._channel).declare()
        except self._errors as error:
            lost = self._unavailable(error)
            self.close()
        while lost is None and (flight.waiting or flight.aside) and control.may_send():
            if not flight.waiting and (verdict := self._suspects.judge(flight.call_suspect())) is not None:
                flight.failed(verdict)
                continue
            row = flight.sent()
            try:
                verdict = self._send(row)
            except self._errors as error:
                lost = self._unavailable(error)
                self._suspects.lost([row])
                self.close()
                break
            self._answered(flight, row, verdict)
            control.progress()
        return Published(flight.end(), lost)

    def _answered(self, flight: Flight, row: Outgoing, verdict: Verdict) -> None:
        flight.answered(row, verdict)
        self._suspects.answered([row], {row.id: verdict})
        if verdict.outcome is Outcome.CONFIRMED:
            self._suspects.works()

    def _send(self, row: Outgoing) -> Verdict:
        try:
            exchange, routing_key = address(row, self.routes)
        except CannotSerialize as error:
            return Verdict(Outcome.UNPUBLISHABLE, str(error), "CannotSerialize")
        # Named as if it were private, but what every virtual transport overrides, and the only way to know.
        if not any(self._channel._lookup(exchange, routing_key)):  # noqa: SLF001
            reason = f"broker: unroutable: no queue is bound to exchange {exchange!r} for {routing_key!r}"
            return Verdict(Outcome.REJECTED, reason, UNROUTABLE)
        try:
            published = content(row, self.routes, self._naming)
            known = published.properties
            message = self._channel.prepare_message(
                published.body,
                content_type=known.pop("content_type"),
                content_encoding=known.pop("content_encoding", None),
                priority=known.pop("priority", None),
                headers=published.headers,
                properties=known,
            )
            self._channel.basic_publish(message, exchange=exchange, routing_key=routing_key)
        except (TypeError, ValueError) as error:
            return Verdict(Outcome.UNPUBLISHABLE, f"the transport cannot carry it: {error}", "CannotSerialize")
        return CONFIRMED

    def tick(self) -> None:
        """Do nothing: these transports have no heartbeat."""

    def close(self) -> None:
        """Close the connection."""
        self._channel = None
        with suppress(*self._errors):
            self._kombu.close()

    def _unavailable(self, error: BaseException) -> BrokerUnavailable:
        if (problem := refusal(error)) is not None:
            return BrokerRefused(f"broker: {problem}")
        return BrokerUnavailable(describe(error))


def _require_exchanges(transport: Any, name: str, routes: Routes) -> None:
    """Raise `ConfigurationError` for a route whose messages the transport would drop without a word."""
    channel: Any = getattr(transport, "Channel", object)
    if not issubclass(channel, virtual.Channel):
        message = f"broker transport {name!r} is not one of kombu's virtual transports and cannot be used"
        raise ConfigurationError(message)
    known = {kind for kind in channel.exchange_types if kind != "fanout" or channel.supports_fanout}
    for route in routes.all:
        if route.exchange and route.exchange_type not in known:
            message = (
                f"route {route.topics!r}: broker transport {name!r} has no {route.exchange_type} exchanges; "
                f"use one of {', '.join(sorted(known))}"
            )
            raise ConfigurationError(message)
