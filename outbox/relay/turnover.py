"""Turns batches over: settles the last, and claims the next, in one transaction or beside a publish."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from sqlalchemy.exc import SQLAlchemyError

from outbox.outage import Outage
from outbox.relay.ahead import Ahead
from outbox.relay.batch import Delivered
from outbox.relay.telling import tell_failures
from outbox.states import Outcome, Verdict
from outbox.telemetry import BatchFenced, BatchSettled, DatabaseStateChanged

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox.progress import Progress
    from outbox.relay.batch import Batch
    from outbox.relay.stopping import Stopping
    from outbox.relay.transactions import Settled, Transactions
    from outbox.telemetry import TelemetryEvent

log = logging.getLogger("outbox.relay")

_SETTLING = "settling in the database"
_CLAIMING = "claiming from the database"


class Turnover:
    """What the relay's loop does in the database, and the batch that it publishes next, if that is claimed already.

    No more than one batch is ever published and not settled: so much is published again when the process is killed.
    """

    def __init__(
        self, transactions: Transactions, stopping: Stopping, progress: Progress, emit: Callable[[TelemetryEvent], None]
    ) -> None:
        self._transactions = transactions
        self._stopping = stopping
        self._progress = progress
        self._emit = emit
        self._ahead = Ahead(partial(transactions.claim, ahead=True))
        self._next: Batch | None = None
        self.database = Outage(log, "database", on_change=lambda error: emit(DatabaseStateChanged(error is None, error)))

    def has_next(self) -> bool:
        """Tell whether the next batch is claimed."""
        return self._next is not None

    def next(self) -> Batch | None:
        """Return the next batch, claimed now or before; `None` if there is nothing. May raise `SQLAlchemyError`."""
        if self._next is None:
            self._progress.note(_CLAIMING)
            self._stopping.about_to_look()
            self._next = self._transactions.claim()
            self.database.over()
        batch, self._next = self._next, None
        return batch

    def begin_ahead(self) -> None:
        """Begin to claim the next batch while one is published; `take_ahead` when that is over."""
        self._ahead.begin()

    def take_ahead(self) -> None:
        """Wait for what was begun, if anything was."""
        self._progress.note(_CLAIMING)
        self._next = self._ahead.take()

    def settle(self, last: Delivered, *, and_claim: bool = False) -> None:
        """Settle a batch, and claim the next one with it if asked to; through an outage of the database if need be.

        What is published and not settled is published twice.
        """
        self._progress.note(_SETTLING)
        while True:
            if and_claim:
                self._stopping.about_to_look()
            try:
                turned = self._transactions.turn_over(last, claim=and_claim)
            except SQLAlchemyError as error:
                pause_s = self.database.pause_s(error)
                if self._stopping.grace_over:
                    log.warning("stopped before the database was back; what was published will be published again")
                    return
                self._progress.note("waiting to settle in the database", rest_s=pause_s)
                self._stopping.rest(pause_s)
                self._progress.note(_SETTLING)
            else:
                self.database.over()
                self._next = turned.batch or self._next
                if turned.settled is not None:
                    self._tell(turned.settled)
                return

    def give_back(self) -> None:
        """Give back what was claimed ahead and will not be published soon."""
        batch, self._next = self._next, None
        if batch is not None:
            self.settle(Delivered(batch, {row.id: Verdict(Outcome.UNSENT) for row in batch.rows}))

    def close(self) -> None:
        """End the thread."""
        self._ahead.close()

    def _tell(self, settled: Settled) -> None:
        if settled.fenced:
            self._emit(BatchFenced(settled.fenced))
        first = tell_failures(settled.failures, self._emit)
        self._emit(BatchSettled(settled.states, settled.seconds, first))
