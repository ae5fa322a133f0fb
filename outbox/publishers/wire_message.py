"""Turns a row into an AMQP message, and finds out here, before the socket sees it, what the wire cannot carry."""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import amqp
from amqp.exceptions import AMQPError

from outbox.publishers import frames
from outbox.routes import SHORT_BYTES
from outbox.wire import KEY_HEADER, TOPIC_HEADER

if TYPE_CHECKING:
    from outbox.outgoing import Outgoing
    from outbox.routes import Routes

PERSISTENT = 2
# Which properties there are (section 4.2.6.1), then each in its order: content type and encoding, headers, delivery mode, message
# id of 36 bytes, timestamp, type.
_USUAL = struct.pack(">H", 0b1111_0000_1110_0000) + b"%b%b\x02\x24%b%b%b"


class CannotSerialize(Exception):
    """The wire cannot carry this message; the text says which part."""


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
    return {**(row.headers or {}), **added}


def properties(row: Outgoing) -> dict[str, Any]:
    """Return the properties of a message, as AMQP 0-9-1 names them."""
    delivery = row.delivery
    if delivery is not None:
        # The id too, because by it a message that comes back unroutable is known.
        return delivery.properties_at(row.age_s) | {"message_id": str(row.message_id), "content_type": row.content_type}
    return {
        "message_id": str(row.message_id),
        "type": row.type,
        "content_type": row.content_type,
        "content_encoding": _encoding(row.content_type),
        "delivery_mode": PERSISTENT,
        "timestamp": int(row.created_at.timestamp()),
    }


def _encoding(content_type: str) -> str:
    text = content_type.startswith("text/") or content_type.partition(";")[0].endswith("json")
    return "utf-8" if text else "binary"


def prepare(row: Outgoing, *, routing_key: str, frame_max: int) -> bytes:
    """Return a row's properties as the wire has them. Raises `CannotSerialize`, also for a routing key that the wire cannot carry."""
    if len(routing_key.encode()) > SHORT_BYTES:
        problem = f"routing key is longer than {SHORT_BYTES} bytes: {routing_key[:40]}..."
        raise CannotSerialize(problem)
    try:
        wire = _usual(row) or _any(row)
    except (struct.error, AMQPError, TypeError, ValueError) as error:
        problem = f"header or property: {error}"
        raise CannotSerialize(problem) from error
    if len(wire) > frame_max - 1024:
        # A larger header frame makes RabbitMQ close the whole connection (501 FRAME_ERROR), with everything in flight.
        problem = f"headers take {len(wire)} bytes, more than the broker's frame of {frame_max} can carry"
        raise CannotSerialize(problem)
    return wire


def _any(row: Outgoing) -> bytes:
    wire: bytes = amqp.Message(application_headers=headers(row), **properties(row))._serialize_properties()  # noqa: SLF001 - it has no other
    return wire


def _usual(row: Outgoing) -> bytes | None:
    """Return the same as `_any` in a tenth of the time, for a row with nothing out of the ordinary; `None` for others."""
    around = None if row.delivery is not None else _same_for_many(row.content_type, row.type)
    table = None if around is None else frames.table(headers(row))
    if around is None or table is None:
        return None
    before, after = around
    return _USUAL % (before, table, str(row.message_id).encode(), struct.pack(">Q", int(row.created_at.timestamp())), after)


@lru_cache(maxsize=1024)
def _same_for_many(content_type: str, kind: str) -> tuple[bytes, bytes] | None:
    try:
        return frames.short(content_type) + frames.short(_encoding(content_type)), frames.short(kind)
    except ValueError:
        return None
