"""A destination of a message's own: where it goes, and as what, when its topic's route has no say in it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outbox.checks import text_bytes
from outbox.encoding import encode
from outbox.errors import InvalidEvent
from outbox.routes import SHORT_BYTES
from outbox.wire import DELIVERY_HEADER

if TYPE_CHECKING:
    from collections.abc import Mapping

DELAY_BITS = 28
"""How many levels kombu's native delayed delivery has, each a word at the head of the routing key."""

_LONGEST_MS = 2**32 - 1  # over a longer expiration, of 50 days, RabbitMQ closes the channel
_MAX_BYTES = 40 * 1024  # RabbitMQ closes the connection over headers that exceed one frame, of 128 KiB


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """Says how to publish one message, for adapters that enqueue what another library would have published.

    `exchange` and `routing_key` are AMQP's. `headers`, and `properties` by their AMQP names, are what goes on the wire;
    apart from the content type, which the event says, and the message id. Both hold only what JSON can hold.
    `expires_in_s`  how long a queue keeps the message, counted from its insert: what has passed by then is taken off. For as
                    long as more than 49 days are left, which is more than RabbitMQ takes, it is not said.
    `delay_s`       `exchange` is one of kombu's native delayed delivery, where the message stays for this time, counted
                    from its insert; `routing_key` is the one without the delay.
    `queues`        what the relay declares first, each as the keyword arguments of a `kombu.Queue`.
    """

    exchange: str
    routing_key: str
    headers: Mapping[str, Any] = field(default_factory=dict, repr=False)
    properties: Mapping[str, Any] = field(default_factory=dict, repr=False)
    expires_in_s: float | None = None
    delay_s: int | None = None
    queues: tuple[Mapping[str, Any], ...] = ()

    def check(self) -> None:
        """Raise `InvalidEvent` for what the database or every broker would refuse."""
        for name, text in (("exchange", self.exchange), ("routing_key", self.routing_key_at(0))):
            if text_bytes("delivery", text, of=f"{name} ") > SHORT_BYTES:
                raise InvalidEvent("delivery", f"{name} is longer than {SHORT_BYTES} bytes")
        stored = self.as_header()
        _require_plain(stored[DELIVERY_HEADER], "")
        if len(encode(stored)) > _MAX_BYTES:
            raise InvalidEvent("delivery", f"headers take more than {_MAX_BYTES} bytes; put what is large into the payload")

    def routing_key_at(self, age_s: float) -> str:
        """Return the routing key for a message that was inserted `age_s` seconds ago."""
        if self.delay_s is None:
            return self.routing_key
        rest = max(0, round(self.delay_s - age_s))
        return ".".join((*f"{rest:0{DELAY_BITS}b}", self.routing_key))

    def properties_at(self, age_s: float) -> dict[str, Any]:
        """Return the properties for a message that was inserted `age_s` seconds ago."""
        if self.expires_in_s is None:
            return dict(self.properties)
        rest_ms = max(0, int((self.expires_in_s - age_s) * 1000))
        return dict(self.properties) if rest_ms > _LONGEST_MS else {**self.properties, "expiration": str(rest_ms)}

    def as_header(self) -> dict[str, Any]:
        """Return what stands among the row's headers. An event cannot set a header of this name."""
        value: dict[str, Any] = {"exchange": self.exchange, "routing_key": self.routing_key}
        for name in ("headers", "properties", "expires_in_s", "delay_s", "queues"):
            if (given := getattr(self, name)) not in (None, {}, ()):
                value[name] = given
        return {DELIVERY_HEADER: value}


def delivery_of(headers: Mapping[str, Any] | None) -> Delivery | None:
    """Return the delivery among a row's headers, if it has one of its own. Raises `TypeError` for one it cannot read."""
    value = headers.get(DELIVERY_HEADER) if isinstance(headers, dict) else None
    return None if value is None else Delivery(**value)


def _require_plain(value: Any, where: str) -> None:
    """Raise `InvalidEvent` for a value that is not the same again after a trip through JSON and AMQP."""
    if isinstance(value, dict):
        for name, content in value.items():
            if not isinstance(name, str):
                raise InvalidEvent("delivery", f"{where or 'the top'} has the name {name!r}, which is not a str")
            text_bytes("delivery", name, of=f"{where} ")
            _require_plain(content, f"{where}.{name}".lstrip("."))
    elif isinstance(value, list | tuple):
        for content in value:
            _require_plain(content, where)
    elif isinstance(value, str):
        text_bytes("delivery", value, of=f"{where} ")
    elif isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise InvalidEvent("delivery", f"{where} does not fit into 64 bits; pass it as a str")
    elif value is not None and not (isinstance(value, float) and math.isfinite(value)):
        raise InvalidEvent("delivery", f"{where} is {value!r:.80}, which JSON has no form for; pass it as a str")
