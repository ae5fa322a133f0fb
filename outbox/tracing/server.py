"""What spans say of a broker: which messaging system it is, and where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from outbox.tracing import names

# Source: the well-known values of `messaging.system`; any other transport is called what its URL says.
_SYSTEMS = {
    "amqp": names.RABBITMQ,
    "amqps": names.RABBITMQ,
    "pyamqp": names.RABBITMQ,
    "rediss": "redis",
    "sentinel": "redis",
    "sqs": "aws_sqs",
    "gcpubsub": "gcp_pubsub",
    "azureservicebus": "servicebus",
    "confluentkafka": "kafka",
}
_PORTS = {"amqp": 5672, "pyamqp": 5672, "amqps": 5671, "redis": 6379, "rediss": 6379}


@dataclass(frozen=True, slots=True)
class Server:
    """A messaging system, with the name of its host and the port if they are known."""

    system: str = names.RABBITMQ
    address: str | None = None
    port: int | None = None

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes of spans that say so."""
        known = {names.SYSTEM: self.system, names.SERVER_ADDRESS: self.address, names.SERVER_PORT: self.port}
        return {name: value for name, value in known.items() if value is not None}


def server_of(url: str) -> Server:
    """Return what a kombu URL, or RQ's, says of its broker; of several that take turns only the system. Never raises."""
    scheme = url.partition(":")[0]
    transport = scheme.partition("+")[0].lower()
    system = _SYSTEMS.get(transport, transport or names.RABBITMQ)
    if transport not in _PORTS or ";" in url:
        return Server(system)
    try:
        parts = urlsplit(url)
        return Server(system, parts.hostname, (parts.port or _PORTS[transport]) if parts.hostname else None)
    except ValueError:
        return Server(system)
