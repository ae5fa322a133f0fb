"""Failed deliveries, held back for a while before the broker gets them back: a broken handler never runs hot."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outbox.inbox.link import Delivery

_REMEMBERED = 10_000


class Holds:
    """Deliveries with the time at which each is to be requeued. Times are of one monotonic clock, in seconds."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Delivery]] = []
        self._order = count()  # so that deliveries themselves are never compared

    def add(self, delivery: Delivery, *, until: float) -> None:
        """Hold a delivery."""
        heapq.heappush(self._heap, (until, next(self._order), delivery))

    def due(self, now: float) -> list[Delivery]:
        """Take out the deliveries whose time has come."""
        due = []
        while self._heap and self._heap[0][0] <= now:
            due.append(heapq.heappop(self._heap)[2])
        return due

    def wait_s(self, now: float, *, at_most: float) -> float:
        """Return how long it is until the next one is due."""
        return min(at_most, max(0.0, self._heap[0][0] - now)) if self._heap else at_most

    def clear(self) -> None:
        """Forget all of them."""
        self._heap.clear()


class Failures:
    """How often in a row each message has failed in this process; the oldest are forgotten beyond 10,000."""

    def __init__(self) -> None:
        self._counts: OrderedDict[str, int] = OrderedDict()

    def add(self, message_id: str) -> int:
        """Count one more failure and return how many there are."""
        failures = self._counts[message_id] = self._counts.pop(message_id, 0) + 1
        if len(self._counts) > _REMEMBERED:
            self._counts.popitem(last=False)
        return failures

    def forget(self, message_id: str) -> None:
        """Start again from none."""
        self._counts.pop(message_id, None)
