"""The rules that every part of an event must meet, so that nothing can fail later, in the relay, out of its author's sight."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from outbox.encoding import encode, is_json
from outbox.errors import InvalidEvent
from outbox.topics import is_topic

MAX_PAYLOAD_BYTES = 16 * 1024 * 1024
"""The largest payload, encoded: RabbitMQ's default `max_message_size`; it closes the channel over a larger one."""

MAX_DELAY = timedelta(days=36_525)
"""The longest delay: a century. Beyond the range of a database's clock the INSERT itself would fail."""

SHORT_TEXT_BYTES = 255
"""The longest type and content type, which travel in AMQP's short strings, and key, which an index holds."""


def text_bytes(field: str, text: str, *, of: str = "") -> int:
    """Return the length of a text in UTF-8. Raise `InvalidEvent` when the database could not store it."""
    if "\0" in text:
        raise InvalidEvent(field, f"{of}contains a NUL character, which the database cannot store; remove it")
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidEvent(
            field, f"{of}contains half of a surrogate pair, which is no text; repair it where it comes from"
        ) from error


def topic(value: object) -> None:
    """Raise `InvalidEvent` unless `value` is a topic."""
    if not isinstance(value, str) or not is_topic(value):
        raise InvalidEvent(
            "topic", "use dot-separated words of letters, digits, _ and -, at most 255 characters: 'orders.placed'"
        )


def key(value: object) -> None:
    """Raise `InvalidEvent` unless `value` is None or an ordering key: 1 to 255 bytes of text."""
    if value is None:
        return
    if not isinstance(value, str):
        raise InvalidEvent("key", f"must be a str, not {type(value).__qualname__}; pass str(...) of the aggregate's id")
    if not 1 <= text_bytes("key", value) <= SHORT_TEXT_BYTES:
        raise InvalidEvent("key", "must be 1 to 255 bytes in UTF-8; leave it out for an event that needs no order")


def label(field: str, value: object) -> None:
    """Raise `InvalidEvent` unless `value` is None or 1 to 255 bytes of printable text."""
    if value is None:
        return
    if not isinstance(value, str) or not value or not value.isprintable() or len(value.encode()) > SHORT_TEXT_BYTES:
        raise InvalidEvent(field, "must be printable text of 1 to 255 bytes in UTF-8")


def due(delay: object, available_at: object) -> None:
    """Raise `InvalidEvent` unless at most one of a delay and an aware datetime is given."""
    if delay is not None and available_at is not None:
        raise InvalidEvent("delay", "give either delay or available_at, not both")
    if delay is not None and not (isinstance(delay, timedelta) and timedelta(0) <= delay <= MAX_DELAY):
        raise InvalidEvent("delay", f"must be a timedelta from zero to {MAX_DELAY.days} days")
    if available_at is not None:
        _moment(available_at)


def _moment(value: object) -> None:
    if not isinstance(value, datetime):
        raise InvalidEvent("available_at", f"must be a datetime, not {type(value).__qualname__}")
    if value.utcoffset() is None:
        raise InvalidEvent("available_at", "is naive, which means another moment on every host; give it a tzinfo, such as UTC")
    try:
        value.astimezone(UTC)
    except OverflowError as error:
        raise InvalidEvent("available_at", "lies outside the years 1 to 9999 in UTC") from error


def message_id(value: object) -> UUID | None:
    """Return `value`, a UUID or its text, as a UUID. Raise `InvalidEvent` for anything else but None."""
    if value is None or isinstance(value, UUID):
        return value
    try:
        return UUID(value if isinstance(value, str) else None)
    except (TypeError, ValueError) as error:
        raise InvalidEvent("message_id", "must be a UUID; leave it out to get one, or derive one with uuid.uuid5") from error


def body(payload: Any, content_type: str | None) -> bytes:
    """Return the payload encoded. Raise `InvalidEvent` when it is not JSON, too large, or contradicts its content type."""
    if isinstance(payload, bytes | bytearray | memoryview):
        if content_type is None:
            raise InvalidEvent("content_type", "say what the bytes are, such as 'application/octet-stream'")
        encoded = bytes(payload)
    elif content_type is not None and not is_json(content_type):
        raise InvalidEvent("content_type", f"is {content_type!r}, but the payload would be encoded as JSON; pass bytes instead")
    else:
        encoded = encode(payload)
    if len(encoded) > MAX_PAYLOAD_BYTES:
        raise InvalidEvent(
            "payload", f"takes {len(encoded)} bytes, more than {MAX_PAYLOAD_BYTES}; store it elsewhere and send its address"
        )
    return encoded
