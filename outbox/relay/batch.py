"""A claimed batch, and the lease that it is published under."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlalchemy.exc import SQLAlchemyError

from outbox import clock

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from outbox.outgoing import Outgoing
    from outbox.relay.stopping import Stopping
    from outbox.states import Verdict

log = logging.getLogger("outbox.relay")


@dataclass(frozen=True, slots=True)
class Batch:
    """Messages to publish, with the partitions that they were claimed under and the tokens of those leases.

    `claimed_at` is the relay's own clock *before* the claim, so that the lease can only be longer than we think. `set_aside`
    counts the messages that the claim moved out of the way instead, because they must wait. `seconds` is how long it took.
    """

    leases: Mapping[int, int]
    rows: Sequence[Outgoing]
    claimed_at: float
    set_aside: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Delivered:
    """A batch whose publish is over: what became of each of its messages, by id, which is to be settled."""

    batch: Batch
    verdicts: Mapping[int, Verdict]


class Lease:
    """Steers the publish of one batch (`publishers.base.Control`).

    Renews only when the broker has answered, so that a relay that hangs loses its lease. Past the lease, on our own
    clock, nothing more is sent: a relay that wakes from a pause adds nothing to what the kernel already held.
    """

    def __init__(
        self,
        batch: Batch,
        stopping: Stopping,
        *,
        lease_s: float,
        renew: Callable[[Mapping[int, int]], set[int]],
        on_progress: Callable[[], None] = lambda: None,
        intact: Callable[[], bool] = lambda: True,
    ) -> None:
        self._batch = batch
        self._stopping = stopping
        self._lease_s = lease_s
        self._renew = renew
        self._on_progress = on_progress
        self._intact = intact
        self._until = batch.claimed_at + lease_s
        self._renew_at = batch.claimed_at + lease_s / 3

    def may_send(self) -> bool:
        """Tell whether the lease is alive and nobody asked us to stop."""
        return not self._stopping.asked and clock.seconds() < self._until and self._intact()

    def may_wait(self) -> bool:
        """Tell whether the grace of a stop is not over."""
        return not self._stopping.grace_over

    def progress(self) -> None:
        """Renew the lease when a third of it has passed."""
        now = clock.seconds()
        if now >= self._renew_at:
            self._prolong(now)
        self._on_progress()  # after the lease, which cannot wait

    def _prolong(self, now: float) -> None:
        self._renew_at = now + self._lease_s / 3
        try:
            held = self._renew(self._batch.leases)
        except SQLAlchemyError as error:
            log.warning("lease not renewed", extra={"error": str(error).partition("\n")[0]})
            return
        # One partition lost is enough to stop: its messages are among those still to be sent.
        self._until = now + self._lease_s if held == set(self._batch.leases) else now
