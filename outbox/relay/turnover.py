"""What a relay has in hand: the batch to publish next, and what is published and not settled yet."""

from __future__ import annotations

import logging
import sys
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from sqlalchemy.exc import SQLAlchemyError

from outbox.outage import Outage
from outbox.relay.batch import Delivered
from outbox.relay.beside import Beside
from outbox.relay.telling import tell_failures
from outbox.states import Outcome, Verdict
from outbox.telemetry import BatchFenced, BatchSettled, DatabaseStateChanged

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from outbox.progress import Progress
    from outbox.relay.batch import Batch
    from outbox.relay.stopping import Stopping
    from outbox.relay.transactions import Settled, Transactions, TurnedOver
    from outbox.telemetry import TelemetryEvent

log = logging.getLogger("outbox.relay")

SETTLING = "settling in the database"
CLAIMING = "claiming from the database"


class Turnover:
    """Turns batches over: settles the last and claims the next, in one transaction, beside the publish of another where that pays.

    Between publishes at most one batch is unsettled. While another is under way at most `most_unsettled` messages are published and
    not settled: so many are published again when the process is killed.
    """

    def __init__(
        self,
        transactions: Transactions,
        stopping: Stopping,
        progress: Progress,
        emit: Callable[[TelemetryEvent], None],
        *,
        most_unsettled: int,
    ) -> None:
        self._transactions = transactions
        self._stopping = stopping
        self._progress = progress
        self._emit = emit
        self._most_unsettled = most_unsettled
        self._beside = Beside(partial(transactions.turn_over, ahead=True))
        self._unsettled: deque[Delivered] = deque()
        self._next: Batch | None = None
        self.database = Outage(log, "database", on_change=lambda error: emit(DatabaseStateChanged(error is None, error)))

    @property
    def unsettled(self) -> int:
        """How many messages are published, and that is not written down."""
        return sum(len(each.verdicts) for each in self._unsettled)

    def has_next(self) -> bool:
        """Tell whether the next batch is claimed."""
        return self._next is not None

    def next(self) -> Batch | None:
        """Return the next batch, claimed now or before; `None` if there is nothing. May raise `SQLAlchemyError`."""
        if self._next is None:
            self._progress.note(CLAIMING)
            self._stopping.about_to_look()
            self._next = self._transactions.claim()
            self.database.over()
        batch, self._next = self._next, None
        return batch

    def begin(self) -> int:
        """Settle what is unsettled, and claim the next batch, beside the publish that begins; return how many that may send meanwhile.

        `take` is to be called before it sends more, and when it is over.
        """
        last = self._unsettled[0] if self._unsettled else None
        self._beside.begin(last)
        return sys.maxsize if last is None else max(0, self._most_unsettled - self.unsettled)

    def take(self) -> bool:
        """Wait for what was begun; tell whether everything is settled."""
        self._progress.note(SETTLING)
        turned = self._beside.take()
        if turned is not None:
            self._turned(turned)
        return not self._unsettled

    def add(self, batch: Batch, verdicts: Mapping[int, Verdict]) -> None:
        """Note what became of a batch, which is to be settled soon."""
        self._unsettled.append(Delivered(batch, verdicts))

    def settle(self, *, and_claim: bool = False) -> None:
        """Settle everything, and claim the next batch with it; through an outage of the database if need be.

        What is published and not settled is published twice.
        """
        self._progress.note(SETTLING)
        while self._unsettled:
            if and_claim:
                self._stopping.about_to_look()
            try:
                last = len(self._unsettled) == 1
                self._turned(self._transactions.turn_over(self._unsettled[0], claim=and_claim and last))
                self.database.over()
            except SQLAlchemyError as error:
                pause_s = self.database.pause_s(error)
                if self._stopping.grace_over:
                    log.warning("stopped before the database was back; what was published will be published again")
                    self._unsettled.clear()
                    return
                self._progress.note("waiting to settle in the database", rest_s=pause_s)
                self._stopping.rest(pause_s)
                self._progress.note(SETTLING)

    def put_down(self) -> None:
        """Settle everything, and give back what was claimed ahead and will not be published soon."""
        batch, self._next = self._next, None
        if batch is not None:
            self.add(batch, {row.id: Verdict(Outcome.UNSENT) for row in batch.rows})
        self.settle()

    def close(self) -> None:
        """End the thread."""
        self._beside.close()

    def _turned(self, turned: TurnedOver) -> None:
        if turned.settled is not None:
            self._unsettled.popleft()
            self._tell(turned.settled)
        if turned.batch is not None:
            self._next = turned.batch

    def _tell(self, settled: Settled) -> None:
        if settled.fenced:
            self._emit(BatchFenced(settled.fenced))
        first = tell_failures(settled.failures, self._emit)
        self._emit(BatchSettled(settled.states, settled.seconds, first))
