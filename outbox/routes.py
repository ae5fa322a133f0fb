"""Where messages of a topic go, and as what: exchange, exchange type, routing key and format."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from string import Formatter
from typing import TYPE_CHECKING, Any

from outbox.errors import ConfigurationError
from outbox.topics import is_pattern, matches
from outbox.wire import DEFAULT_EXCHANGE, Format

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox.outgoing import Outgoing

EXCHANGE_TYPES = ("topic", "direct", "fanout", "headers")
SHORT_BYTES = 255
"""How many bytes the name of an exchange or queue, and a routing key, may have in AMQP 0-9-1."""
_NAMES = ("topic", "key", "type")
_URI_REFERENCE = re.compile(r"[A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=%-]{1,255}")


@dataclass(frozen=True, slots=True)
class Route:
    """Sends the topics that `topics` selects (`*` one word, `#` any number) to one exchange.

    `routing_key` may contain `{topic}`, `{key}` and `{type}`. The exchange `""` is the broker's own that
    delivers to the queue named by the routing key. The relay declares the exchange (durable) unless
    `declare` is false, and the durable `queues`, each bound by `topics`, so that nothing is unroutable
    before the first consumer came. `format` says as what they are published, if not as `Routes` says.
    Raises `ConfigurationError` for values that cannot work.
    """

    topics: str
    exchange: str = DEFAULT_EXCHANGE
    exchange_type: str = "topic"
    routing_key: str = "{topic}"
    queues: Sequence[str] = ()
    declare: bool = True
    format: Format | None = None

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
        known = ", ".join(Format)
        self._require(self.format is None or self.format in list(Format), f"format is {self.format!r}; use one of {known}")
        object.__setattr__(self, "format", self.format and Format(self.format))

    def _require(self, holds: bool, problem: str) -> None:  # noqa: FBT001 - reads as a sentence
        if not holds:
            message = f"route {self.topics!r}: {problem}"
            raise ConfigurationError(message)

    def key_for(self, row: Outgoing) -> str:
        """Return the routing key of a message."""
        if self.routing_key == "{topic}":
            return row.topic
        return self.routing_key.format(topic=row.topic, key=row.key or "", type=row.type)


@dataclass(frozen=True, slots=True)
class Routes:
    """The routes of a relay, first match wins; what no route selects goes to the exchange `outbox`.

    `format` is that of all routes that have none of their own. `source` is what CloudEvents say that they come from, a URI or a
    path of at most 255 characters. Raises `ConfigurationError` when it cannot be one, or is needed and missing.
    """

    routes: tuple[Route, ...] = ()
    format: Format = Format.OUTBOX
    source: str = ""
    _found: dict[str, Route] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.format not in list(Format):
            message = f"format is {self.format!r}; use one of {', '.join(Format)}"
            raise ConfigurationError(message)
        object.__setattr__(self, "format", Format(self.format))
        if self.source and not _URI_REFERENCE.fullmatch(self.source):
            message = f"source is {self.source!r}; write a URI or a path of at most 255 characters, such as /shop"
            raise ConfigurationError(message)
        formats = {self.format, *(route.format or self.format for route in self.routes)}
        if not self.source and formats != {Format.OUTBOX}:
            name = ", ".join(sorted(formats - {Format.OUTBOX}))
            message = f"format {name} needs a source: say which application the events come from, such as --source /shop"
            raise ConfigurationError(message)

    def of(self, topic: str) -> Route:
        """Return the route of a topic."""
        route = self._found.get(topic)
        if route is None:
            route = next(route for route in self.all if matches(route.topics, topic))
            if len(self._found) < 10_000:
                self._found[topic] = route
        return route

    def format_of(self, topic: str) -> Format:
        """Return as what messages of a topic are published."""
        return self.of(topic).format or self.format

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
