"""What a scrape shows of the database: asked for seldom, never waited for for long, left out when there is no answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.registry import Collector

from outbox.seldom import Seldom

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from prometheus_client.metrics_core import Metric

T = TypeVar("T")

KEEP_S = 5.0
LIMIT_S = 1.0


class DatabaseGauges(Collector, Generic[T]):
    """Reads with `read` at most every five seconds, waits a second at most, and shows what `families` makes of it.

    `outbox_database_up` is 1 if that has succeeded. Otherwise it is 0, and what is only known from the database is missing
    from the scrape, rather than old.
    """

    def __init__(self, read: Callable[[], T], families: Callable[[T], Iterable[Metric]]) -> None:
        self._read = Seldom(read, name="outbox-metrics", limit_s=LIMIT_S, keep_s=KEEP_S)
        self._families = families

    def collect(self) -> Iterator[Metric]:
        """Return the gauges."""
        answer = self._read.answer()
        up = answer.waiting_s is None and answer.error is None
        yield GaugeMetricFamily(
            "outbox_database_up", "Whether the database answers when metrics ask it: 1 or 0.", value=float(up)
        )
        if answer.value is not None:
            yield from self._families(answer.value)


def labelled(
    name: str, documentation: str, values: Mapping[str, float], *, label: str, more: Mapping[str, str] | None = None
) -> GaugeMetricFamily:
    """Return a gauge with one value for each value of a label; `more` are labels that all have."""
    others = more or {}
    family = GaugeMetricFamily(name, documentation, labels=[label, *others])
    for key, value in values.items():
        family.add_metric([key, *others.values()], value)
    return family
