"""The low-water cursor: from which id on a partition has to be searched for what is deliverable.

While a session holds back vacuum, the index entries of everything that was published since stay, and a search from the start
walks past all of them, at every poll. So each relay remembers, in its own memory, the id below which nothing of a partition is
left. Three kinds of messages could still come up behind that place, and none may be overlooked, or its key would be reordered:

- those of transactions that have taken their ids and not committed: the place counts only when all that were writing to the table at
  a time after the search have ended, and another search has found nothing up to there;
- those that become deliverable after they were not (due, unblocked, retried, resumed): marked `again`, and found by an index of their own;
- those that nobody has thought of: from time to time everything is searched from the start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from outbox import clock
from outbox.states import State
from outbox.store.claim import NO_LOWS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from outbox.relay.settling import Judged

LOOK_EVERY_S = 0.25
SWEEP_EVERY_S = 60.0


@dataclass(frozen=True, slots=True)
class _Candidate:
    """Places that count as soon as none of these writers is at work any more."""

    places: Mapping[int, int]
    writers: frozenset[str]


class Cursor:
    """One relay's memory of where its partitions begin. Not thread safe."""

    def __init__(self) -> None:
        self._lows = list(NO_LOWS)
        self._passed: dict[int, int] = {}
        self._candidate: _Candidate | None = None
        self._looked_at = self._swept_at = clock.seconds()

    @property
    def lows(self) -> list[int]:
        """From which id on each partition is to be searched."""
        if clock.seconds() - self._swept_at >= SWEEP_EVERY_S:
            self._swept_at = clock.seconds()
            return list(NO_LOWS)
        return self._lows

    @property
    def due(self) -> bool:
        """Whether there is a place to gain, and it is time to look who is writing and to tell `look`."""
        hopeful = self._candidate is not None or bool(self._passed)
        return hopeful and clock.seconds() - self._looked_at >= LOOK_EVERY_S

    def settled(self, judged: Judged) -> None:
        """Note what a search has found, and what is left of it, once that is committed."""
        passed = {row.partition: row.id + 1 for row in judged.sent}  # in id order, so the last of each counts
        for each in judged.rest:
            passed[each.row.partition] = max(each.row.id + 1, passed.get(each.row.partition, 0))
        for each in reversed(judged.rest):
            if each.state is State.PENDING:
                passed[each.row.partition] = each.row.id
        self._passed |= passed

    def look(self, writers: frozenset[str]) -> dict[int, int]:
        """Return the places that count if nothing is found up to there now; `writers` are the transactions that are writing."""
        self._looked_at = clock.seconds()
        ripe: dict[int, int] = {}
        if self._candidate is not None and not self._candidate.writers & writers:
            ripe = {place: low for place, low in self._candidate.places.items() if low > self._lows[place]}
            self._candidate = None
        if self._candidate is None and self._passed:
            self._candidate = _Candidate(self._passed, writers)
            self._passed = {}
        return ripe

    def advance(self, places: Mapping[int, int]) -> None:
        """Search these partitions from there on."""
        for place, low in places.items():
            self._lows[place] = low
