"""Publishes into a list, for tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.publishers.base import Published
from outbox.publishers.flight import CONFIRMED, Flight
from outbox.states import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outbox.outgoing import Outgoing
    from outbox.publishers.base import Control
    from outbox.states import Verdict


class MemoryPublisher:
    """Implements `Publisher` in memory: `published` holds every confirmed message in order.

    `judge` decides what becomes of a message; by default all are confirmed.
    """

    blocked = False

    def __init__(self, judge: Callable[[Outgoing], Verdict] = lambda _row: CONFIRMED) -> None:
        self.published: list[Outgoing] = []
        self._judge = judge

    def connect(self) -> None:
        """Do nothing."""

    def publish(self, rows: Sequence[Outgoing], control: Control) -> Published:
        """Publish a batch; see `Publisher`."""
        flight = Flight(rows)
        while flight.waiting and control.may_send():
            row = flight.sent()
            verdict = self._judge(row)
            if verdict.outcome is Outcome.CONFIRMED:
                self.published.append(row)
            flight.answered(row, verdict)
            control.progress()
        return Published(flight.end())

    def tick(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
