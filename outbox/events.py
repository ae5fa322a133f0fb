"""What an application hands to `enqueue`: an `Event`, or an instance of its own class that is registered with `@event`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import UUID

from outbox import checks
from outbox import headers as header_rules
from outbox.errors import InvalidEvent

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import datetime, timedelta

    from outbox.delivery import Delivery
    from outbox.headers import HeaderValue

C = TypeVar("C", bound=type)
_REGISTRATION = "__outbox_event__"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened, to be published once the transaction that it is enqueued in has committed.

    `topic`         where it goes: dot-separated words, `orders.placed`; routes map it to the broker's exchange.
    `payload`       bytes, with a `content_type`; or anything that `outbox.encoding.encode` can turn into JSON.
                    Encoded here: what is changed afterwards has no effect. At most 16 MiB encoded.
    `key`           the ordering key, 1 to 255 bytes. Events of one key are published in order; None asks for no order.
    `headers`       names (1 to 128 ASCII characters, not `x-...` or `outbox-...`) to str, bool, 64-bit int or None; at most 32 KiB.
    `type`          what the consumer is told it is; the topic when None.
    `content_type`  `application/json` when None.
    `delay`         publish no sooner than this after the insert, by the database's clock.
    `available_at`  or no sooner than this moment, an aware datetime. An event that waits does not hold back later ones of its key.
    `delivery`      for adapters: where the message goes and as what, instead of what the route of its topic says.
    `message_id`    a UUID or its text, by which consumers know the message again; made at `enqueue` when None.
                    The same one enqueued twice makes the second transaction fail.

    Raises `InvalidEvent`, which names the field and what to do, for everything that the database or a broker would refuse.
    """

    topic: str
    payload: Any = field(repr=False)
    key: str | None = None
    headers: Mapping[str, HeaderValue] | None = field(default=None, repr=False)
    type: str | None = None
    content_type: str | None = None
    delay: timedelta | None = None
    available_at: datetime | None = None
    message_id: UUID | str | None = None
    delivery: Delivery | None = field(default=None, repr=False)
    body: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        checks.topic(self.topic)
        checks.key(self.key)
        checks.label("type", self.type)
        checks.label("content_type", self.content_type)
        checks.due(self.delay, self.available_at)
        if self.headers is not None:
            header_rules.check(self.headers)
            object.__setattr__(self, "headers", dict(self.headers))
        if self.delivery is not None:
            self.delivery.check()
        object.__setattr__(self, "message_id", checks.message_id(self.message_id))
        object.__setattr__(self, "body", checks.body(self.payload, self.content_type))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Registration:
    """How instances of one class become events; kept on the class itself, so that subclasses inherit it."""

    topic: str
    key: str | Callable[[Any], str | UUID | int | None] | None
    headers: Callable[[Any], Mapping[str, HeaderValue]] | None
    type: str | None
    content_type: str | None
    encoder: Callable[[Any], object] | None

    def event_of(self, instance: object) -> Event:
        return Event(
            topic=self.topic,
            payload=self.encoder(instance) if self.encoder else instance,
            key=self._key_of(instance),
            headers=self.headers(instance) if self.headers else None,
            type=self.type,
            content_type=self.content_type,
        )

    def _key_of(self, instance: object) -> str | None:
        if self.key is None:
            return None
        value: Any = getattr(instance, self.key, None) if isinstance(self.key, str) else self.key(instance)
        if value is None and isinstance(self.key, str):
            problem = f"attribute {self.key!r} is missing or None; if the database makes it, flush first"
            raise InvalidEvent("key", problem)
        is_id = isinstance(value, UUID | int) and not isinstance(value, bool)
        key: str | None = str(value) if is_id else value  # anything else is for Event to judge
        return key


def event(
    *,
    topic: str,
    key: str | Callable[[Any], str | UUID | int | None] | None = None,
    headers: Callable[[Any], Mapping[str, HeaderValue]] | None = None,
    type: str | None = None,  # noqa: A002 - named like the event's field
    content_type: str | None = None,
    encoder: Callable[[Any], object] | None = None,
) -> Callable[[C], C]:
    """Register a class, so that `enqueue` takes its instances: `@event(topic="orders.placed", key="order_id")`.

    The class is a dataclass or a pydantic model, or any class when `encoder` is given, a function from the instance to a
    payload. `key` names the attribute (str, UUID or int) that orders the events, or is a function from the instance, which may
    return None for no order; `headers` is a function from the instance. Subclasses inherit the registration
    until they are registered themselves. Raises `InvalidEvent` for a topic, type or content type that no event may have.
    """
    checks.topic(topic)
    checks.label("type", type)
    checks.label("content_type", content_type)
    registration = _Registration(topic=topic, key=key, headers=headers, type=type, content_type=content_type, encoder=encoder)

    def register(cls: C) -> C:
        setattr(cls, _REGISTRATION, registration)
        return cls

    return register


def as_event(value: object) -> Event:
    """Return `value` as an `Event`. Raises `InvalidEvent` when it is neither one nor of a registered class."""
    if isinstance(value, Event):
        return value
    registration: _Registration | None = getattr(type(value), _REGISTRATION, None)
    if registration is None:
        name = type(value).__qualname__
        problem = f"{name} is no event; pass Event(topic=..., payload=...), or register the class with @outbox.event(topic=...)"
        raise InvalidEvent("payload", problem)
    return registration.event_of(value)
