"""A consumer's metrics, for Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram

from outbox.observe.gauges import DatabaseGauges, labelled
from outbox.observe.servers import ServerMetrics
from outbox.observe.topics import Topics
from outbox.telemetry import (
    BreakerChanged,
    BrokerStateChanged,
    DuplicateDropped,
    HandlingEnded,
    MessageDied,
    MessageHandled,
    MessageRetried,
    TelemetryEvent,
)
from outbox.telemetry.bus import Choosing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client.metrics_core import Metric

    from outbox.store.failed_stats import FailedCounts

_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_COUNTED: tuple[tuple[type[TelemetryEvent], str, str], ...] = (
    (MessageHandled, "outbox_consumer_handled", "Messages whose effects are committed."),
    (DuplicateDropped, "outbox_consumer_duplicates", "Messages that came again after they were handled."),
    (MessageRetried, "outbox_consumer_retried", "Tries that failed and will be repeated."),
    (MessageDied, "outbox_consumer_dead", "Messages given up."),
)


class ConsumerMetrics(Choosing):
    """A subscriber that counts, in a registry of the caller's own; `read` looks at the database, see `DatabaseGauges`."""

    def __init__(self, registry: CollectorRegistry, read: Callable[[], FailedCounts], *, consumer: str) -> None:
        self._topics = Topics()
        self._consumer = consumer
        servers = ServerMetrics(registry)
        labels = ["topic", "consumer"]
        self._counters = {kind: Counter(name, text, labels, registry=registry) for kind, name, text in _COUNTED}
        self._seconds = Histogram(
            "outbox_handler_duration_seconds",
            "How long a message was handled, its transaction included, by the pattern that its handler is registered under.",
            ["handler", "consumer"],
            buckets=_SECONDS,
            registry=registry,
        )
        registry.register(DatabaseGauges(read, self._families))
        self.chosen = {
            **dict.fromkeys(self._counters, self._count),
            HandlingEnded: self._ended,
            BrokerStateChanged: servers.broker,
            BreakerChanged: servers.breaker,
        }

    def _count(self, event: MessageHandled | DuplicateDropped | MessageRetried | MessageDied) -> None:
        self._counters[type(event)].labels(self._topics(event.topic), self._consumer).inc()

    def _ended(self, event: HandlingEnded) -> None:
        if event.ran:
            self._seconds.labels(event.handler, self._consumer).observe(event.seconds)

    def _families(self, found: FailedCounts) -> Iterator[Metric]:
        counts = {state: float(number) for state, number in found.messages.items()}
        capped = {state: float(state in found.capped) for state in counts}
        mine = {"consumer": self._consumer}
        name, text = "outbox_consumer_failed_messages", "Failed messages of the consumer, counted up to a bound."
        yield labelled(name, text, counts, label="state", more=mine)
        yield labelled(f"{name}_capped", f"1 where there may be more than {name} says.", capped, label="state", more=mine)
