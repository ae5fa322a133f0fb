"""Turns a row into an AMQP message, and finds out here, before the socket sees it, what the wire cannot carry."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import amqp
from amqp.exceptions import AMQPError

from outbox.publishers import cloudevents, frames
from outbox.publishers.cloudevents import AMQP
from outbox.routes import SHORT_BYTES, Routes
from outbox.wire import KEY_HEADER, TOPIC_HEADER, TRACE_HEADERS, Format

if TYPE_CHECKING:
    from collections.abc import Mapping

    from outbox.outgoing import Outgoing
    from outbox.publishers.cloudevents import Naming

PERSISTENT = 2
# Which properties there are (section 4.2.6.1), then each in its order: content type and encoding, headers, delivery mode, message
# id of 36 bytes, timestamp, type.
_USUAL = struct.pack(">H", 0b1111_0000_1110_0000) + b"%b%b\x02\x24%b%b%b"
_PLAIN = Routes()


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
    """Return the headers of a message: the event's own, its topic and its key; or those of its delivery and the trace."""
    delivery = row.delivery
    if delivery is not None:
        traced = {} if "traceparent" in delivery.headers else row.headers or {}
        return {each: traced[each] for each in TRACE_HEADERS if each in traced} | dict(delivery.headers)
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


@dataclass(frozen=True, slots=True)
class Content:
    """What is published of a row: its headers, its properties as AMQP 0-9-1 names them, and its body."""

    headers: Mapping[str, Any]
    properties: dict[str, Any]
    body: bytes


def content(row: Outgoing, routes: Routes, naming: Naming = AMQP) -> Content:
    """Return what is published of a row in the format of its route. What has a delivery of its own is another library's."""
    form = Format.OUTBOX if row.delivery is not None else routes.format_of(row.topic)
    if form is Format.OUTBOX:
        return Content(headers(row), properties(row), row.payload)
    if form is Format.CLOUDEVENTS:
        return Content(headers(row) | cloudevents.binary(row, routes.source, naming), properties(row), row.payload)
    known = properties(row) | {"content_type": cloudevents.CONTENT_TYPE, "content_encoding": "utf-8"}
    return Content(headers(row), known, cloudevents.structured(row, routes.source))


class WireMessage(NamedTuple):
    """A message as the wire has it: its properties serialized, and its body."""

    properties: bytes
    body: bytes


def prepare(row: Outgoing, routes: Routes = _PLAIN, *, routing_key: str, frame_max: int) -> WireMessage:
    """Return the message of a row. Raises `CannotSerialize`, also for a routing key that the wire cannot carry."""
    if len(routing_key.encode()) > SHORT_BYTES:
        problem = f"routing key is longer than {SHORT_BYTES} bytes: {routing_key[:40]}..."
        raise CannotSerialize(problem)
    try:
        message = _usual(row, routes) or _any(row, routes)
    except (struct.error, AMQPError, TypeError, ValueError) as error:
        problem = f"header or property: {error}"
        raise CannotSerialize(problem) from error
    if len(message.properties) > frame_max - 1024:
        # A larger header frame makes RabbitMQ close the whole connection (501 FRAME_ERROR), with everything in flight.
        problem = f"headers take {len(message.properties)} bytes, more than the broker's frame of {frame_max} can carry"
        raise CannotSerialize(problem)
    return message


def _any(row: Outgoing, routes: Routes) -> WireMessage:
    published = content(row, routes)
    message = amqp.Message(application_headers=published.headers, **published.properties)
    return WireMessage(message._serialize_properties(), published.body)  # noqa: SLF001 - it has no other


def _usual(row: Outgoing, routes: Routes) -> WireMessage | None:
    """Return the same as `_any` in a tenth of the time, for a row with nothing out of the ordinary; `None` for others."""
    if row.delivery is not None or routes.format_of(row.topic) is not Format.OUTBOX:
        return None
    around = _same_for_many(row.content_type, row.type)
    if around is None:
        return None
    table = frames.table(headers(row)) if row.headers else _table(row.topic, row.key)
    if table is None:
        return None
    before, after = around
    sent_at = struct.pack(">Q", int(row.created_at.timestamp()))
    return WireMessage(_USUAL % (before, table, str(row.message_id).encode(), sent_at, after), row.payload)


def _table(topic: str, key: str | None) -> bytes:
    """Return the headers of a message that has none of its own."""
    return frames.of_fields(_topic(topic)) if key is None else frames.of_fields(_topic(topic), frames.field(KEY_HEADER, key))


@lru_cache(maxsize=1024)
def _topic(topic: str) -> bytes:
    return frames.field(TOPIC_HEADER, topic)


@lru_cache(maxsize=1024)
def _same_for_many(content_type: str, kind: str) -> tuple[bytes, bytes] | None:
    try:
        return frames.short(content_type) + frames.short(_encoding(content_type)), frames.short(kind)
    except ValueError:
        return None
