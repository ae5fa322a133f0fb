"""Jobs that wait for a moment before they are tried again, in the consumer itself."""

from __future__ import annotations

import heapq
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outbox.inbox.jobs import Job


class Holds:
    """Jobs with the time at which each is to be tried again. Times are of one monotonic clock, in seconds."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Job]] = []
        self._order = count()  # so that jobs themselves are never compared

    def add(self, job: Job, *, until: float) -> None:
        """Hold a job."""
        heapq.heappush(self._heap, (until, next(self._order), job))

    def due(self, now: float) -> list[Job]:
        """Take out the jobs whose time has come."""
        due = []
        while self._heap and self._heap[0][0] <= now:
            due.append(heapq.heappop(self._heap)[2])
        return due

    def wait_s(self, now: float, *, at_most: float) -> float:
        """Return how long it is until the next one is due."""
        return min(at_most, max(0.0, self._heap[0][0] - now)) if self._heap else at_most
