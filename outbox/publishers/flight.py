"""One batch under way: which message may go next, what is on the wire, and what became of each."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from outbox.outgoing import MOST_HEADERS_BYTES
from outbox.points import Point, reached
from outbox.states import Outcome, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from outbox.outgoing import Outgoing

Address = tuple[str, str]
"""An exchange and a routing key."""

CONFIRMED = Verdict(Outcome.CONFIRMED)
TOO_LARGE = Verdict(Outcome.UNPUBLISHABLE, f"headers take more than {MOST_HEADERS_BYTES} bytes as JSON", "CannotSerialize")


class Flight:
    """Hands out rows so that two messages of one key are never on the wire together.

    Otherwise a broker could refuse the first and take the second, and their order would be lost. Suspects (row ids, with how
    often each was tried alone) are put aside when their turn comes, until `call_suspect` calls them one by one. Of those for an
    address that is said to lead nowhere, the first is sent, and the others `follow` it.
    """

    def __init__(self, rows: Sequence[Outgoing], *, suspects: Mapping[int, int] | None = None) -> None:
        self._suspects = suspects or {}
        self._aside: dict[int, Outgoing] = {}
        self.verdicts: dict[int, Verdict] = {}
        self.wire_bytes = 0
        self._until_half = -(-len(rows) // 2)
        self._on_wire: dict[int, tuple[Outgoing, int]] = {}
        self._waiting: dict[str, deque[Outgoing]] = {}
        self._ready: deque[Outgoing] = deque()
        self._leaders: dict[int, Address] = {}
        self._followers: dict[Address, list[Outgoing]] = {}
        self._back: dict[Address, Verdict] = {}
        self.through: set[Address] = set()
        first = []
        for row in rows:
            if row.key is not None and row.key in self._waiting:
                self._waiting[row.key].append(row)
                continue
            if row.key is not None:
                self._waiting[row.key] = deque()
            first.append(row)
        for row in first:
            self._release(row)

    @property
    def on_wire(self) -> int:
        """How many messages were sent and have no answer yet."""
        return len(self._on_wire)

    @property
    def waiting(self) -> bool:
        """Tell whether there is a row that may be sent now."""
        return bool(self._ready)

    @property
    def head(self) -> Outgoing:
        """The row that may be sent now; raises `IndexError` if there is none."""
        return self._ready[0]

    @property
    def unknown(self) -> list[Outgoing]:
        """What was sent and has no answer yet."""
        return [row for row, _ in self._on_wire.values()]

    @property
    def aside(self) -> bool:
        """Tell whether suspects wait for being sent alone."""
        return bool(self._aside)

    def call_suspect(self) -> Outgoing:
        """Make a suspect, one that was tried least, the row that may be sent now; there must be one, and no other `head`."""
        row = self._aside.pop(min(self._aside, key=lambda number: self._suspects.get(number, 0)))
        self._ready.append(row)
        return row

    def follow(self, place: Address) -> bool:
        """Let `head` share the fate of the first message for this address; false if it is to be sent itself.

        It waits for that one's answer, and is rejected with it, or sent after it.
        """
        if place in self.through or self.head.id in self._leaders:
            return False
        if place in self._back:
            self.failed(self._back[place])
        elif place in self._followers:
            self._followers[place].append(self._ready.popleft())
        else:
            self._leaders[self.head.id], self._followers[place] = place, []
            return False
        return True

    def sent(self, size: int = 0) -> Outgoing:
        """Note that `head` was put on the wire, with so many bytes."""
        row = self._ready.popleft()
        self._on_wire[row.id] = (row, size)
        self.wire_bytes += size
        self._until_half -= 1
        if self._until_half == 0:
            reached(Point.HALF_SENT)
        return row

    def recall(self, row: Outgoing) -> None:
        """Note that the row that was `sent` last was not put on the wire after all."""
        _, size = self._on_wire.pop(row.id)
        self.wire_bytes -= size
        self._ready.appendleft(row)

    def answered(self, row: Outgoing, verdict: Verdict) -> None:
        """Note what became of a row that was on the wire."""
        sent = self._on_wire.pop(row.id, None)
        if sent is not None:
            self.wire_bytes -= sent[1]
            self._judge(row, verdict)
            self._lead(row, verdict)

    def failed(self, verdict: Verdict) -> None:
        """Note that `head` cannot be sent at all."""
        self._judge(self._ready.popleft(), verdict)

    def take_unknown(self) -> list[Outgoing]:
        """Return, in order, what was on the wire when the channel was lost, and make it the next to be sent."""
        rows = sorted(self.unknown, key=lambda row: row.id)
        self._on_wire.clear()
        self.wire_bytes = 0
        self._ready.extendleft(reversed(rows))
        return rows

    def end(self) -> dict[int, Verdict]:
        """Return every verdict: what is still on the wire is unknown, what was not sent is unsent."""
        groups = (*self._waiting.values(), *self._followers.values())
        unsent = [*self._ready, *self._aside.values(), *(row for rows in groups for row in rows)]
        self._all(self.unknown, Outcome.UNKNOWN)
        self._all(unsent, Outcome.UNSENT)
        return self.verdicts

    def _lead(self, row: Outgoing, verdict: Verdict) -> None:
        place = self._leaders.pop(row.id, None)
        if place is None:
            return
        followers = self._followers.pop(place)
        if verdict.outcome is Outcome.REJECTED:
            self._back[place] = verdict
            for follower in followers:
                self._judge(follower, verdict)
        else:
            self.through.add(place)
            self._ready.extend(followers)

    def _judge(self, row: Outgoing, verdict: Verdict) -> None:
        self.verdicts[row.id] = verdict
        if row.key is None:
            return
        followers = self._waiting[row.key]
        if verdict.outcome is not Outcome.CONFIRMED:
            self._all(followers, Outcome.HELD)
            followers.clear()
        elif followers:
            self._release(followers.popleft())

    def _release(self, row: Outgoing) -> None:
        if row.headers is None:
            self._judge(row, TOO_LARGE)
        elif row.id in self._suspects:
            self._aside[row.id] = row
        else:
            self._ready.append(row)

    def _all(self, rows: Iterable[Outgoing], outcome: Outcome) -> None:
        self.verdicts.update((row.id, Verdict(outcome)) for row in rows)
