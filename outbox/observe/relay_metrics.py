"""A relay's metrics, for Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import GaugeMetricFamily

from outbox.observe.distribution import Distribution
from outbox.observe.gauges import DatabaseGauges, labelled
from outbox.observe.servers import ServerMetrics
from outbox.observe.topics import Topics
from outbox.states import Outcome
from outbox.telemetry import (
    BatchFenced,
    BatchPublished,
    BreakerChanged,
    BrokerStateChanged,
    LeaseRenewed,
    PublishGivenUp,
)
from outbox.telemetry.bus import Choosing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client.metrics_core import Metric

    from outbox.store.gauges import Gauges

_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 3600.0)
_PUBLISH_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_MESSAGES = (1, 10, 50, 100, 250, 500, 1000, 2500, 5000, 10_000)
_NOT_TRIED = (Outcome.HELD, Outcome.UNSENT)


class RelayMetrics(Choosing):
    """A subscriber that counts, in a registry of the caller's own; `read` looks at the database, see `DatabaseGauges`."""

    def __init__(self, registry: CollectorRegistry, read: Callable[[], Gauges]) -> None:
        self._topics = Topics()
        servers = ServerMetrics(registry)
        self._published = Counter(
            "outbox_published", "Messages by what came of a publish.", ["topic", "outcome"], registry=registry
        )
        self._attempts = Counter(
            "outbox_attempts", "Publishes of messages that were tried, also again.", ["topic"], registry=registry
        )
        self._dead = Counter("outbox_dead", "Messages given up.", ["topic"], registry=registry)
        self._fenced = Counter("outbox_fenced_batches", "Batches whose outcome was dropped with their lease.", registry=registry)
        self._renewals = Counter("outbox_lease_renewals", "Renewals of leases during a publish.", registry=registry)
        self._duration = Histogram(
            "outbox_publish_duration_seconds", "How long the publish of a batch took.", buckets=_PUBLISH_S, registry=registry
        )
        self._messages = Histogram("outbox_batch_messages", "Messages in a batch.", buckets=_MESSAGES, registry=registry)
        latency = "From the INSERT of a message to its confirm, too long by a batch at most."
        self._latency = Distribution("outbox_delivery_latency_seconds", latency, bounds=_LATENCY_S)
        registry.register(self._latency)
        registry.register(DatabaseGauges(read, _families))
        self.chosen = {
            BatchPublished: self._note_published,
            BatchFenced: lambda _event: self._fenced.inc(),
            LeaseRenewed: lambda _event: self._renewals.inc(),
            PublishGivenUp: lambda event: self._dead.labels(self._topics(event.topic)).inc(),
            BrokerStateChanged: servers.broker,
            BreakerChanged: servers.breaker,
        }

    def _note_published(self, event: BatchPublished) -> None:
        self._duration.observe(event.seconds)
        self._messages.observe(len(event.rows))
        self._latency.add(event.latencies_s())
        for (topic, outcome), number in event.outcomes().items():
            label = self._topics(topic)
            self._published.labels(label, outcome.value).inc(number)
            if outcome not in _NOT_TRIED:
                self._attempts.labels(label).inc(number)


def _families(found: Gauges) -> Iterator[Metric]:
    counts = {state.value: float(number) for state, number in found.messages.items()}
    capped = {state: float(number >= found.counted_up_to) for state, number in counts.items()}
    bound = f"counted up to {found.counted_up_to}"
    yield labelled("outbox_messages", f"Messages in the table, {bound}.", counts, label="state")
    yield labelled(
        "outbox_messages_capped", f"1 where there may be more than outbox_messages says: {bound}.", capped, label="state"
    )
    oldest = "Age of the oldest message that could be published now; 0 when there is none."
    yield GaugeMetricFamily("outbox_oldest_deliverable_age_seconds", oldest, value=found.oldest_deliverable_s or 0.0)
    alive = "Relays that wrote themselves down within the last minute, whatever process is asked."
    yield GaugeMetricFamily("outbox_relays_alive", alive, value=float(found.relays_alive))
