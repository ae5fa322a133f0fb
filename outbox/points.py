"""Named points on a message's way, at which the fault tests stop a process. The product itself never sets `hook`."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Point(StrEnum):
    """Moments between two steps that must not come apart: at each of them a crash has to leave the books in balance."""

    AFTER_CLAIM = "after claim"  # the leases are committed, nothing is sent
    HALF_SENT = "half sent"  # half of the batch is on the wire
    BEFORE_SETTLE = "before settle"  # the publish is over, and nothing is written down
    DURING_SETTLE = (
        "during settle"  # the leases are given back, what was sent is written down, what failed is not, nothing is committed
    )
    DURING_PROMOTION = "during promotion"  # due messages are made pending, nothing is committed
    DURING_CLEANUP = "during clean-up"  # old rows are deleted, nothing is committed
    AFTER_COUNT = "after count"  # the consumer has counted an attempt, the handler has not begun
    AFTER_LEASE = "after lease"  # the lease on a message is committed, the handler has not begun
    BEFORE_COMPLETE = "before complete"  # a leased handler has returned, its result is not written
    BEFORE_FAILURE = "before failure"  # a handler has failed and is rolled back, nothing of that is written
    BEFORE_COMMIT = "before commit"  # the handler has returned, the consumer's transaction is open
    BEFORE_ACK = "before ack"  # the consumer's transaction is committed, the broker does not know


hook: Callable[[Point], None] | None = None


def reached(point: Point) -> None:
    """Tell the hook, if there is one, that a point is passed."""
    if hook is not None:
        hook(point)
