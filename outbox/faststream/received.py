"""Reads a message of FastStream's as one of ours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.inbox.errors import UnusableMessage
from outbox.inbox.message import read

if TYPE_CHECKING:
    from outbox.inbox.message import Message


def from_aio_pika(received: Any) -> Message:
    """Build a `Message` from an `aio_pika.IncomingMessage`. Raises `UnusableMessage` for one without an id.

    FastStream's own `message_id` will not do: where the message has none, it makes up another one at every delivery.
    """
    message = read(
        bytes(received.body),
        dict(received.headers or {}),
        {"message_id": received.message_id, "type": received.type},
        content_type=received.content_type,
        routing_key=received.routing_key,
        redelivered=bool(received.redelivered),
    )
    if not message.message_id:
        raise UnusableMessage("the message has no id; whoever publishes it must set the property message_id")
    return message
