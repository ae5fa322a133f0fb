"""Turns a row into an AMQP message, and finds out here, before the socket sees it, what the wire cannot carry."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import amqp
from amqp.exceptions import AMQPError

from outbox.routes import SHORT_BYTES
from outbox.wire import KEY_HEADER, TOPIC_HEADER

if TYPE_CHECKING:
    from outbox.outgoing import Outgoing
    from outbox.routes import Routes

PERSISTENT = 2


class CannotSerialize(Exception):
    """The wire cannot carry this message; the text says which part."""


class WireMessage(amqp.Message):
    """An AMQP message whose properties are serialized once, at construction."""

    def __init__(self, body: bytes, **properties: Any) -> None:
        super().__init__(body, **properties)
        self.wire: bytes = super()._serialize_properties()
        self.header_size = len(self.wire)
        self.size = self.header_size + len(body)

    def _serialize_properties(self) -> bytes:
        return self.wire


def address(row: Outgoing, routes: Routes) -> tuple[str, str]:
    """Return the exchange and the routing key of a message. Raises `CannotSerialize` for a delivery that cannot be read."""
    try:
        delivery = row.delivery
    except TypeError as error:
        problem = f"delivery: {error}; was it enqueued by a newer version?"
        raise CannotSerialize(problem) from error
    if delivery is not None:
        return delivery.exchange, delivery.routing_key_at(row.age_s)
    route = routes.of(row.topic)
    return route.exchange, route.key_for(row)


def headers(row: Outgoing) -> dict[str, Any]:
    """Return the headers of a message: the event's own, its topic and its key; or exactly those of its delivery."""
    delivery = row.delivery
    if delivery is not None:
        return dict(delivery.headers)
    added = {TOPIC_HEADER: row.topic} if row.key is None else {TOPIC_HEADER: row.topic, KEY_HEADER: row.key}
    return {**row.headers, **added}


def properties(row: Outgoing) -> dict[str, Any]:
    """Return the properties of a message, as AMQP 0-9-1 names them."""
    delivery = row.delivery
    if delivery is not None:
        # The id too, because by it a message that comes back unroutable is known.
        return delivery.properties_at(row.age_s) | {"message_id": str(row.message_id), "content_type": row.content_type}
    text = row.content_type.startswith("text/") or row.content_type.partition(";")[0].endswith("json")
    return {
        "message_id": str(row.message_id),
        "type": row.type,
        "content_type": row.content_type,
        "content_encoding": "utf-8" if text else "binary",
        "delivery_mode": PERSISTENT,
        "timestamp": int(row.created_at.timestamp()),
    }


def prepare(row: Outgoing, *, routing_key: str, frame_max: int) -> WireMessage:
    """Return the message of a row. Raises `CannotSerialize`, also for a routing key that the wire cannot carry."""
    if len(routing_key.encode()) > SHORT_BYTES:
        problem = f"routing key is longer than {SHORT_BYTES} bytes: {routing_key[:40]}..."
        raise CannotSerialize(problem)
    try:
        message = WireMessage(row.payload, application_headers=headers(row), **properties(row))
    except (struct.error, AMQPError, TypeError, ValueError) as error:
        problem = f"header or property: {error}"
        raise CannotSerialize(problem) from error
    if message.header_size > frame_max - 1024:
        # A larger header frame makes RabbitMQ close the whole connection (501 FRAME_ERROR), with everything in flight.
        problem = f"headers take {message.header_size} bytes, more than the broker's frame of {frame_max} can carry"
        raise CannotSerialize(problem)
    return message
