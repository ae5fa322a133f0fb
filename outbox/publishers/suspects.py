"""Which messages may be what breaks the connection: those that were on the wire when it was lost."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from outbox.mention import naming
from outbox.states import Outcome, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from outbox.outgoing import Outgoing

log = logging.getLogger("outbox.publishers")

MOST_ALONE = 3
"""After so many losses with it alone on the wire a message counts as the cause."""

GUILTY = Verdict(Outcome.REJECTED, "broker: connection lost each time this message was sent alone", "ConnectionLost")
_UNANSWERED = (Outcome.UNKNOWN, Outcome.UNSENT, Outcome.HELD)
_MOST_KNOWN = 10_000


class Suspects:
    """Remembers them, by row id, for as long as the publisher lives.

    A suspect is sent alone, after everything that is not one, until the broker has answered for it. A loss with it alone
    counts only once the broker has shown that it works otherwise (`works`); if it shows that it does not (`away`), the
    loss was an outage's. So an outage convicts nobody. Not guaranteed: that a message that brings the broker itself down is
    found, because that looks like an outage.
    """

    def __init__(self) -> None:
        self._alone: dict[int, int] = {}
        self._new: set[int] = set()  # by the last loss
        self._tried: Outgoing | None = None  # alone, at the last loss

    @property
    def alone(self) -> Mapping[int, int]:
        """How often each suspect, by row id, was alone on the wire when the connection was lost."""
        return self._alone

    def lost(self, rows: Sequence[Outgoing]) -> None:
        """Note that the connection was lost, by no decision of ours or of an operator, with these on the wire."""
        self._new = {row.id for row in rows if row.id not in self._alone}
        self._tried = rows[0] if len(rows) == 1 and not self._new else None
        self._alone.update(dict.fromkeys(self._new, 0))
        while len(self._alone) > _MOST_KNOWN:  # what other relays have settled stays here
            del self._alone[next(iter(self._alone))]

    def away(self) -> None:
        """Note that the broker is away: that explains the last loss."""
        for number in self._new:
            self._alone.pop(number, None)
        self._new, self._tried = set(), None

    def works(self) -> None:
        """Note that the broker works: the last loss may have been a message's doing."""
        row, self._tried = self._tried, None
        self._new = set()
        if row is not None and row.id in self._alone:
            self._alone[row.id] += 1
            extra = {**naming(row), "times": self._alone[row.id]}
            log.warning("connection lost with one message alone on the wire", extra=extra)

    def answered(self, rows: Iterable[Outgoing], verdicts: Mapping[int, Verdict]) -> None:
        """Note what became of messages: one that the broker has answered for, with yes or no, breaks no connection."""
        if not self._alone:
            return
        for row in rows:
            verdict = verdicts[row.id]
            if verdict is not GUILTY and verdict.outcome not in _UNANSWERED:
                self._alone.pop(row.id, None)

    def judge(self, row: Outgoing) -> Verdict | None:
        """Return the verdict on a suspect that was alone too often; None while it is to be tried.

        It stays a suspect: at its next attempt one more loss is enough.
        """
        if self._alone.get(row.id, 0) < MOST_ALONE:
            return None
        self._alone[row.id] = MOST_ALONE - 1
        return GUILTY
