"""Where messages of a topic go: exchange, exchange type and routing key."""

from __future__ import annotations

from dataclasses import dataclass, field
from string import Formatter
from typing import TYPE_CHECKING, Any

from outbox.errors import ConfigurationError
from outbox.topics import is_pattern, matches
from outbox.wire import DEFAULT_EXCHANGE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox.outgoing import Outgoing

EXCHANGE_TYPES = ("topic", "direct", "fanout", "headers")
SHORT_BYTES = 255
"""How many bytes the name of an exchange or queue, and a routing key, may have in AMQP 0-9-1."""
_NAMES = ("topic", "key", "type")


@dataclass(frozen=True, slots=True)
class Route:
    """Sends the topics that `topics` selects (`*` one word, `#` any number) to one exchange.

    `routing_key` may contain `{topic}`, `{key}` and `{type}`. The exchange `""` is the broker's own that
    delivers to the queue named by the routing key. The relay declares the exchange (durable) unless
    `declare` is false, and the durable `queues`, each bound by `topics`, so that nothing is unroutable
    before the first consumer came. Raises `ConfigurationError` for values that cannot work.
    """

    topics: str
    exchange: str = DEFAULT_EXCHANGE
    exchange_type: str = "topic"
    routing_key: str = "{topic}"
    queues: Sequence[str] = ()
    declare: bool = True

    def __post_init__(self) -> None:
        for name in ("topics", "exchange", "exchange_type", "routing_key"):
            self._require(isinstance(getattr(self, name), str), f"{name} is {getattr(self, name)!r}; write a text")
        self._require(is_pattern(self.topics), "topics is not a topic pattern; write words separated by dots, each may be * or #")
        known = ", ".join(EXCHANGE_TYPES)
        self._require(self.exchange_type in EXCHANGE_TYPES, f"exchange_type is {self.exchange_type!r}; use one of {known}")
        self._require(_is_template(self.routing_key), "routing_key may contain only {topic}, {key} and {type}")
        self._require(_is_short(self.exchange), f"exchange is longer than {SHORT_BYTES} bytes")
        self._require(_is_short(self.routing_key), f"routing_key is longer than {SHORT_BYTES} bytes")
        queues: Any = self.queues
        named = isinstance(queues, list | tuple) and all(
            isinstance(queue, str) and queue and _is_short(queue) for queue in queues
        )
        self._require(named, f'queues is {queues!r}; write a list of names of at most {SHORT_BYTES} bytes: ["orders"]')
        self._require(isinstance(self.declare, bool), f"declare is {self.declare!r}; write true or false")

    def _require(self, holds: bool, problem: str) -> None:  # noqa: FBT001 - reads as a sentence
        if not holds:
            message = f"route {self.topics!r}: {problem}"
            raise ConfigurationError(message)

    def key_for(self, row: Outgoing) -> str:
        """Return the routing key of a message."""
        return self.routing_key.format(topic=row.topic, key=row.key or "", type=row.type)


@dataclass(frozen=True, slots=True)
class Routes:
    """The routes of a relay, first match wins; what no route selects goes to the exchange `outbox`."""

    routes: tuple[Route, ...] = ()
    _found: dict[str, Route] = field(default_factory=dict, init=False, repr=False, compare=False)

    def of(self, topic: str) -> Route:
        """Return the route of a topic."""
        route = self._found.get(topic)
        if route is None:
            route = next(route for route in self.all if matches(route.topics, topic))
            if len(self._found) < 10_000:
                self._found[topic] = route
        return route

    @property
    def all(self) -> tuple[Route, ...]:
        """Return every route, the default one last unless an earlier one already selects everything."""
        return self.routes if any(route.topics == "#" for route in self.routes) else (*self.routes, Route("#"))


def _is_template(text: str) -> bool:
    """Tell whether the placeholders of a routing key are the three plain names, without formats or attributes."""
    try:
        found = [placeholder for _, *placeholder in Formatter().parse(text) if placeholder[0] is not None]
    except ValueError:
        return False
    return all(name in _NAMES and not spec and conversion is None for name, spec, conversion in found)


def _is_short(text: str) -> bool:
    return len(text.encode(errors="surrogatepass")) <= SHORT_BYTES
