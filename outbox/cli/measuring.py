"""Puts together what /metrics shows: only where it is served, and prometheus-client is installed."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outbox import __version__
from outbox.http.metrics import exposing, missing
from outbox.relay.looking import looking

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client import CollectorRegistry

    from outbox.http.server import Reply
    from outbox.settings import RelaySettings
    from outbox.store.failed_stats import FailedCounts
    from outbox.telemetry import Subscriber


@dataclass(frozen=True, slots=True)
class Measuring:
    """Who is to be told what happens, and what answers /metrics."""

    subscribers: tuple[Subscriber, ...] = ()
    answer: Callable[[str], Reply] = missing


@contextmanager
def measuring_relay(settings: RelaySettings, *, served: bool) -> Iterator[Measuring]:
    """Give the metrics of a relay."""
    try:
        from outbox.observe.relay_metrics import RelayMetrics
    except ImportError:
        served = False
    if not served:
        yield Measuring()
        return
    registry = _registry()
    with looking(settings) as look:
        yield Measuring((RelayMetrics(registry, look),), exposing(registry))


def measuring_consumer(consumer: str, look: Callable[[], FailedCounts], *, served: bool) -> Measuring:
    """Return the metrics of a consumer."""
    try:
        from outbox.observe.consumer_metrics import ConsumerMetrics
    except ImportError:
        served = False
    if not served:
        return Measuring()
    registry = _registry()
    return Measuring((ConsumerMetrics(registry, look, consumer=consumer),), exposing(registry))


def _registry() -> CollectorRegistry:
    """Return a registry of our own: the global one is the application's."""
    from prometheus_client import CollectorRegistry, Info

    registry = CollectorRegistry()
    Info("outbox_build", "The version that runs.", registry=registry).info({"version": __version__})
    return registry
