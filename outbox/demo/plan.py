"""What a demo is to do, and when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from outbox.demo.folder import BATCH_SIZE

if TYPE_CHECKING:
    from outbox.demo.watch import View


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the demo is to do. `rollback` is the part of the orders that is rolled back, from 0 to 1."""

    orders: int
    rollback: float
    kills: int
    timeout_s: float

    def relay_is_due(self, view: View) -> bool:
        """Tell whether to start the relay: late, so that there is a backlog, and full batches to be killed in."""
        return view.committed + view.rolled_back >= self.orders / 5

    def kill_is_due(self, view: View, *, done: int) -> bool:
        """Tell whether this is the moment of a kill: they are spread over the run, each with messages in flight."""
        share = self.orders * (1 - self.rollback) / (self.kills + 1)
        if done == self.kills or view.published < share * (done + 1):
            return False
        overdue = view.published > share * (done + 1.5)
        return view.in_flight >= (1 if overdue else max(1, min(BATCH_SIZE // 5, share // 4)))
