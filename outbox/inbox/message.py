"""A received message, as handlers see it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from outbox import wire
from outbox.inbox.cloudevents import attribute, opened
from outbox.inbox.ids import message_id_of

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Message:
    """One message, whatever broker it came through.

    `message_id` is the same in every delivery of the message, and empty when its publisher set none (then `Inbox`
    refuses it); of a CloudEvent without one it is made of its source and id. `topic` is the name it was enqueued under, `key` its ordering key, `type` and `content_type` what the
    publisher said about the `payload`. `payload` is exactly the bytes that were published; of a CloudEvent that has everything
    in its body it is the data, and the attributes are among the headers, as in binary mode (`cloudEvents_source`). `headers` holds
    all of its headers, the relay's own included. `redelivered` says that the broker has delivered it before; False
    does not mean that nobody has handled it.
    """

    message_id: str
    topic: str
    payload: bytes = field(repr=False)
    key: str | None = None
    type: str | None = None
    content_type: str | None = None
    headers: Mapping[str, Any] = field(default_factory=dict, repr=False)
    redelivered: bool = False

    def json(self) -> Any:
        """Return the payload decoded as JSON. Raises `ValueError` when it is not JSON."""
        return json.loads(self.payload)


def from_kombu(received: Any) -> Message:
    """Build a `Message` from a `kombu.Message` of any transport."""
    headers, properties, delivery = received.headers, received.properties, received.delivery_info
    return read(
        _bytes(received.body, received.content_encoding),
        headers,
        properties,
        content_type=received.content_type,
        routing_key=delivery.get("routing_key"),
        redelivered=bool(delivery.get("redelivered")),
    )


def read(
    body: bytes,
    headers: Mapping[str, Any],
    properties: Mapping[str, Any],
    *,
    content_type: str | None,
    routing_key: str | None,
    redelivered: bool,
) -> Message:
    """Build a `Message` from what a broker delivered, of any client; its `properties` are those that AMQP names so."""
    inner = opened(headers, content_type, body)
    key = headers.get(wire.KEY_HEADER)
    return Message(
        message_id=message_id_of(properties, inner.headers) or "",
        topic=str(headers.get(wire.TOPIC_HEADER) or routing_key or ""),
        payload=inner.payload,
        key=attribute(inner.headers, "partitionkey") if key is None else str(key),
        type=properties.get("type") or attribute(inner.headers, "type"),
        content_type=inner.content_type,
        headers=MappingProxyType(dict(inner.headers)),
        redelivered=redelivered,
    )


def _bytes(body: Any, encoding: str | None) -> bytes:
    if isinstance(body, str):  # a transport that decoded the body by its content encoding
        return body.encode("utf-8" if encoding in (None, "binary") else encoding)
    return bytes(body or b"")
