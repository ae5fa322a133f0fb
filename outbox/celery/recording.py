"""A kombu producer that publishes nothing: it hands over what would have been put on the wire."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import kombu
from kombu.transport.native_delayed_delivery import MAX_NUMBER_OF_BITS_TO_USE

from outbox.delivery import DELAY_BITS
from outbox.errors import InvalidEvent

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

assert DELAY_BITS == MAX_NUMBER_OF_BITS_TO_USE  # noqa: S101 - another kombu would read other routing keys

_PICKLE = "application/x-python-serialize"
_PLAIN_QUEUE, _PLAIN_EXCHANGE = kombu.Queue().as_dict(recurse=True), kombu.Exchange().as_dict(recurse=True)


@dataclass(frozen=True, slots=True)
class Recorded:
    """One publish: its body in bytes, and all that kombu had made of its arguments."""

    body: bytes
    content_type: str
    exchange: str
    routing_key: str
    headers: Mapping[str, Any]
    properties: Mapping[str, Any]
    queues: tuple[dict[str, Any], ...]


class RecordingProducer(kombu.Producer):
    """Serializes and compresses as any producer, then calls `record` instead of a broker."""

    def __init__(self, record: Callable[[Recorded], None]) -> None:
        self._record = record
        self._declared: list[dict[str, Any]] = []
        super().__init__(_Channel(self._publish_nowhere), auto_declare=False)

    @property
    def connection(self) -> Any:
        """A stand-in for the connection: there is none."""
        return _NoConnection()

    def publish(self, body: Any, **options: Any) -> Any:
        """Record one publish. Raises `InvalidEvent` for a body that was pickled."""
        self._declared = []
        return super().publish(body, **{**options, "retry": False, "retry_policy": None})

    def maybe_declare(self, entity: Any, *_: Any, **__: Any) -> None:
        """Note what the relay has to declare before it publishes."""
        self._declared.append(_entity(entity))

    def _publish_nowhere(self, message: dict[str, Any], exchange: str, routing_key: str) -> None:
        if message["content_type"] == _PICKLE:
            raise InvalidEvent("payload", "pickle runs whatever code somebody put into it; use serializer='json'")
        properties = message["properties"] | {name: message[name] for name in ("priority", "content_encoding")}
        self._record(
            Recorded(
                body=_bytes(message["body"], message["content_encoding"]),
                content_type=message["content_type"],
                exchange=exchange,
                routing_key=routing_key or "",
                headers=message["headers"],
                properties={name: value for name, value in properties.items() if value is not None},
                queues=tuple(self._declared),
            )
        )


class _Channel:
    """As much of a channel as a producer uses."""

    def __init__(self, publish: Callable[[dict[str, Any], str, str], None]) -> None:
        self._publish = publish

    def prepare_message(
        self, body: Any, priority: Any, content_type: str, content_encoding: str, headers: Any, properties: Any
    ) -> dict[str, Any]:
        return {
            "body": body,
            "priority": priority,
            "content_type": content_type,
            "content_encoding": content_encoding,
            "headers": headers,
            "properties": properties,
        }

    def basic_publish(self, message: dict[str, Any], *, exchange: str, routing_key: str, **_: Any) -> None:
        self._publish(message, exchange, routing_key)


class _NoConnection:
    @staticmethod
    def _reraise_as_library_errors() -> AbstractContextManager[None]:
        return nullcontext()


def _bytes(body: Any, encoding: str) -> bytes:
    return body.encode("utf-8" if encoding in (None, "binary") else encoding) if isinstance(body, str) else bytes(body)


def _entity(entity: Any) -> dict[str, Any]:
    """Return the keyword arguments that make this queue, or this exchange alone, again: those that are not as usual."""
    if isinstance(entity, kombu.Exchange):
        return {"exchange": _exchange(entity.as_dict(recurse=True))}
    given = _differing(entity.as_dict(recurse=True), _PLAIN_QUEUE)
    if given.get("exchange"):
        given["exchange"] = _exchange(given["exchange"])
    if given.get("bindings"):
        given["bindings"] = [
            _differing(binding, {}) | {"exchange": _exchange(binding["exchange"])} for binding in given["bindings"]
        ]
    return given


def _exchange(options: dict[str, Any]) -> dict[str, Any]:
    return _differing(options, _PLAIN_EXCHANGE) | {"name": options["name"], "type": options["type"]}


def _differing(options: dict[str, Any], usual: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None and value != usual.get(name)}
