"""The headers that an event may carry: what every broker passes on unchanged."""

from __future__ import annotations

from collections.abc import Mapping

from outbox.checks import text_bytes
from outbox.encoding import encode
from outbox.errors import InvalidEvent
from outbox.wire import RESERVED_PREFIX

HeaderValue = str | bool | int | None
"""What a header may hold: these types survive every broker. Whole numbers must fit into 64 bits with sign."""

MAX_HEADERS_BYTES = 32 * 1024
"""The most that all headers of an event may take as JSON. RabbitMQ closes the connection when the headers exceed one
frame (128 KiB); the rest is left to what the relay and tracing add."""

MAX_NAME = 128


def check(value: object) -> None:
    """Raise `InvalidEvent` unless `value` is a mapping of valid header names to `HeaderValue`, small enough in total."""
    if not isinstance(value, Mapping):
        raise InvalidEvent("headers", f"must be a dict, not {type(value).__qualname__}")
    for name, content in value.items():
        _header_name(name)
        _header_value(name, content)
    if len(encode(dict(value))) > MAX_HEADERS_BYTES:
        raise InvalidEvent("headers", f"take more than {MAX_HEADERS_BYTES} bytes; put what is large into the payload")


def _header_name(name: object) -> None:
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME or not name.isascii() or not name.isprintable():
        raise InvalidEvent("headers", f"the name {name!r} must be 1 to {MAX_NAME} printable ASCII characters")
    if name.startswith(RESERVED_PREFIX):
        raise InvalidEvent(
            "headers", f"{name!r}: names that begin with {RESERVED_PREFIX!r} are written by the relay; choose another"
        )
    if name.startswith("x-"):
        raise InvalidEvent(
            "headers", f"{name!r}: names that begin with 'x-' are reserved by brokers, which act on them; choose another"
        )


def _header_value(name: str, value: object) -> None:
    if isinstance(value, str):
        text_bytes("headers", value, of=f"{name!r} ")
    elif isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise InvalidEvent("headers", f"{name!r} does not fit into 64 bits; pass it as a str")
    elif value is not None:
        raise InvalidEvent(
            "headers", f"{name!r} must be a str, bool, int or None, not {type(value).__qualname__}; pass it as a str"
        )
