"""Reads a message of FastStream's as one of ours."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from outbox import wire
from outbox.inbox.errors import UnusableMessage
from outbox.inbox.ids import message_id_of
from outbox.inbox.message import Message


def from_aio_pika(received: Any) -> Message:
    """Build a `Message` from an `aio_pika.IncomingMessage`. Raises `UnusableMessage` for one without an id.

    FastStream's own `message_id` will not do: where the message has none, it makes up another one at every delivery.
    """
    headers = dict(received.headers or {})
    message_id = message_id_of({"message_id": received.message_id}, headers)
    if message_id is None:
        raise UnusableMessage("the message has no id; whoever publishes it must set the property message_id")
    key = headers.get(wire.KEY_HEADER)
    return Message(
        message_id=message_id,
        topic=str(headers.get(wire.TOPIC_HEADER) or received.routing_key or ""),
        payload=bytes(received.body),
        key=None if key is None else str(key),
        type=received.type,
        content_type=received.content_type,
        headers=MappingProxyType(headers),
        redelivered=bool(received.redelivered),
    )
