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


def headers(row: Outgoing) -> dict[str, Any]:
    """Return the headers of a message: the event's own, its topic and its key."""
    added = {TOPIC_HEADER: row.topic} if row.key is None else {TOPIC_HEADER: row.topic, KEY_HEADER: row.key}
    return {**row.headers, **added}


def properties(row: Outgoing) -> dict[str, Any]:
    """Return the properties of a message, as AMQP 0-9-1 names them."""
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
