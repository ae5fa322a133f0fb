"""The metrics of the broker, which relays and consumers have in common."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge

from outbox.store.registry import Broker
from outbox.telemetry import BreakerChanged, BrokerStateChanged


class ServerMetrics:
    """Registers them, and is told what changes."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._state = Gauge("outbox_broker_state", "1 for how the broker was last found.", ["state"], registry=registry)
        for state in Broker:
            self._state.labels(state).set(0)
        self._breaker = Gauge(
            "outbox_breaker_open", "1 while work with the broker pauses after a failure, until one succeeds.", registry=registry
        )
        self._blocked = Gauge(
            "outbox_blocked_connection", "1 while a memory or disk alarm makes the broker take nothing.", registry=registry
        )

    def broker(self, event: BrokerStateChanged) -> None:
        """Note how the broker is found."""
        for state in Broker:
            self._state.labels(state).set(state == event.state)
        self._blocked.set(event.state == Broker.BLOCKED)

    def breaker(self, event: BreakerChanged) -> None:
        """Note whether work with it is held up."""
        self._breaker.set(event.open)
