"""By which id a message is known again, whoever published it."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Any

from outbox.wire import CLOUD_EVENTS

if TYPE_CHECKING:
    from collections.abc import Mapping

LONGEST_ID = 255
"""How many characters the inbox's records have room for."""


def message_id_of(properties: Mapping[str, Any], headers: Mapping[str, Any]) -> str | None:
    """Return the id that is the same in every delivery of a message, or None when its producer has given it none.

    It is the property `message_id`; else, for a CloudEvent in binary mode, made of its `source` and `id`, which only
    together are unique: the two with a space between them. What is longer than 255 characters, and a source with a space
    in it, which no URI has, is represented by its SHA-256 instead.
    """
    given = _text(properties.get("message_id"))
    if given:
        return given if len(given) <= LONGEST_ID else _digest(given)
    for prefix in CLOUD_EVENTS:
        source, number = _text(headers.get(f"{prefix}source")), _text(headers.get(f"{prefix}id"))
        if source and number:
            return _joined(source, number)
    return None


def _joined(source: str, number: str) -> str:
    joined = f"{source} {number}"
    if len(joined) <= LONGEST_ID and " " not in source:
        return joined
    return _digest(f"{len(source)} {joined}")


def _digest(text: str) -> str:
    return f"sha256:{sha256(text.encode(errors='surrogatepass')).hexdigest()}"


def _text(value: object) -> str:
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).decode(errors="backslashreplace")
    return "" if value is None else str(value)
