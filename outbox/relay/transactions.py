"""The relay's transactions: claim, renew, settle. Each is short, and none is open while the network is used."""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outbox import clock
from outbox.points import Point, reached
from outbox.relay.batch import Batch, Delivered
from outbox.relay.cursor import Cursor
from outbox.relay.pausing import divide
from outbox.relay.settling import Judged, judge, waiting, write
from outbox.store import claim, promote, settle
from outbox.store.dialects import limit_statements
from outbox.store.plans import WALKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import sqlalchemy as sa

    from outbox.outgoing import Outgoing
    from outbox.policies import Policies
    from outbox.relay.presence import Presence
    from outbox.relay.settling import Settlement
    from outbox.states import State, Verdict
    from outbox.tables import Tables

MOST_PARTITIONS = 16
_MOST_BESIDE_OTHERS = 8  # sixteen each, while one batch is published and the next is claimed, is all that there is for two relays
_STATEMENT_LIMIT_S = 10.0
_PROMOTE_AT_ONCE = 1000
_RETRY_SHARE = 100
_BUSY_FROM = 8  # what part of a batch is more than a relay with nothing to catch up on finds at a time
_PROMOTE_EVERY_S = 0.1
_MOST_STRETCH = 4.0


@dataclass(frozen=True, slots=True)
class Settled:
    """What was written down: messages by their new state, those that have failed, and how many were dropped as fenced."""

    states: Mapping[State, int]
    fenced: int
    failures: Sequence[Settlement]
    seconds: float


@dataclass(frozen=True, slots=True)
class TurnedOver:
    """What one transaction has done: what it wrote down of the last batch, if there was one, and the next if one was found."""

    settled: Settled | None
    batch: Batch | None


class Transactions:
    """The relay's view of the database. Every method is one transaction and may raise `SQLAlchemyError`.

    `owner` names the relay in `outbox_partition`; it must be new for every process start. With `presence`, others learn when the
    process is gone, and it learns of others.
    """

    def __init__(
        self,
        engine: sa.Engine,
        tables: Tables,
        *,
        owner: str,
        lease_s: float,
        batch_size: int,
        policies: Policies,
        keep_sent: bool = False,
        presence: Presence | None = None,
    ) -> None:
        self._engine = engine
        self._tables = tables
        self._owner = owner
        self._lease_s = lease_s
        self._batch_size = batch_size
        self._policies = policies
        self._keep_sent = keep_sent
        self._presence = presence
        self._cursor = Cursor()
        self._stretch = 1.0
        self._last_read = 0
        self._promote_at = 0.0

    def claim(self, *, ahead: bool = False) -> Batch | None:
        """Promote what is due, lease some partitions and read what is unsent in them; `None` if there is nothing.

        What is due may be found a tenth of a second late, or by the claim after one that returned `None`.

        A message whose key is held back by an earlier one, or whose topic is paused, is moved to `blocked` here, out of the
        way of later claims. Which topics are paused is read only now that there is work: an idle poll pays nothing for it.

        `ahead`: another batch is in hand. Then this goes under the same name as that one, also when the name's lock has been lost.
        """
        return self.turn_over(None, ahead=ahead).batch

    def settle(self, batch: Batch, verdicts: Mapping[int, Verdict]) -> Settled:
        """Give the leases back and write down the outcomes, for those partitions alone that are still held.

        Safe to call again when it is not known whether it committed: the second time the leases are no longer held.
        """
        settled = self.turn_over(Delivered(batch, verdicts), claim=False).settled
        assert settled is not None  # noqa: S101 - there was a batch
        return settled

    def turn_over(self, last: Delivered | None, *, claim: bool = True, ahead: bool = False) -> TurnedOver:
        """Settle the `last` batch, if there is one, and `claim` the next, in one transaction: see `settle` and `claim`."""
        judged = Judged() if last is None else judge(last.batch.rows, last.verdicts, self._policies)
        owner = self._name(ahead=ahead) if claim else self._owner
        began = clock.seconds()
        mine, batch = judged, None
        with self._begin() as connection:
            if last is not None:
                mine = self._write(connection, last.batch.leases, judged)
            if claim:
                batch = self._claim(connection, owner)
        if last is None:
            return TurnedOver(None, batch)
        self._cursor.settled(mine)
        seconds = clock.seconds() - began - (batch.seconds if batch is not None else 0)
        return TurnedOver(Settled(mine.states(), len(judged) - len(mine), mine.failures, seconds), batch)

    def _write(self, connection: sa.Connection, leases: Mapping[int, int], judged: Judged) -> Judged:
        """Write down the outcomes; return those that are ours."""
        held = settle.release(
            connection,
            self._tables,
            leases,
            sent=judged.ids(),
            keep_sent=self._keep_sent,
            published=judged.published(),
            failed=judged.failed(),
        )
        reached(Point.DURING_SETTLE)
        mine = judged if held == set(leases) else judged.of(held)
        write(connection, self._tables, mine)
        return mine

    def _claim(self, connection: sa.Connection, owner: str) -> Batch | None:
        claimed_at = clock.seconds()
        self._promote(connection)
        if self._cursor.due:
            self._advance(connection)
        lows = self._cursor.lows
        gone = () if self._presence is None else self._presence.gone(connection)
        leases = claim.lease_partitions(
            connection,
            self._tables,
            owner=owner,
            lease_s=self._lease_s,
            most=MOST_PARTITIONS,
            most_beside=_MOST_BESIDE_OTHERS,
            lows=lows,
            gone=gone,
        )
        if not leases:
            self._last_read = 0
            return None
        free, kept_back = self._read(connection, leases, lows)
        self._set_aside(connection, kept_back)
        return Batch(leases, free, claimed_at, set_aside=len(kept_back), seconds=clock.seconds() - claimed_at)

    def _promote(self, connection: sa.Connection) -> None:
        """Make pending what is due; not at every claim while one follows on another.

        Few while much is pending, so that retries do not crowd out the rest.
        """
        now = clock.seconds()
        if self._last_read and now < self._promote_at:
            return
        busy = self._last_read >= self._batch_size // _BUSY_FROM
        most = max(1, self._batch_size // _RETRY_SHARE) if busy else _PROMOTE_AT_ONCE
        promoted = promote.promote(connection, self._tables, most=most)
        reached(Point.DURING_PROMOTION)
        self._promote_at = now if promoted == most else now + _PROMOTE_EVERY_S

    def _name(self, *, ahead: bool) -> str:
        if self._presence is None:
            return self._owner
        return self._presence.name if ahead else self._presence.renew()

    def _advance(self, connection: sa.Connection) -> None:
        ripe = self._cursor.look(claim.writers(connection, self._tables))
        if ripe:
            left = claim.left_behind(connection, self._tables, self._cursor.lows, ripe)
            self._cursor.advance({place: low for place, low in ripe.items() if place not in left})

    def _read(
        self, connection: sa.Connection, leases: Mapping[int, int], lows: Sequence[int]
    ) -> tuple[list[Outgoing], list[Outgoing]]:
        """Return about a batch of what is unsent, spread over the leased partitions: what may go out, and what must wait.

        Where some are nearly empty the others may give more, as the last batch has shown; what is too much stays for later,
        and since it is the end of the id order, nothing of a key is overtaken.
        """
        share = math.ceil(self._stretch * self._batch_size / len(leases))
        found = claim.unsent(connection, self._tables, leases, limit=share, lows=lows)
        self._last_read = len(found.rows)
        self._stretch = min(_MOST_STRETCH, max(1.0, self._stretch * self._batch_size / max(1, len(found.rows))))
        return divide(found.rows[: self._batch_size], found.paused)

    def _set_aside(self, connection: sa.Connection, rows: Sequence[Outgoing]) -> None:
        if not rows:
            return
        held = {row.key for row in rows if row.key is not None and row.must_wait}
        holders = claim.holders(connection, self._tables, held) if held else {}
        # One that waits for a pause alone has no holder: what else holds its key back may be a later message.
        blocked = [waiting(row, holders.get(row.key or "") if row.must_wait else None, self._policies) for row in rows]
        write(connection, self._tables, Judged((), blocked))

    def renew(self, leases: Mapping[int, int]) -> set[int]:
        """Prolong the leases; return the partitions that are still held."""
        with self._begin() as connection:
            return claim.renew(connection, self._tables, leases, lease_s=self._lease_s)

    @contextmanager
    def _begin(self) -> Iterator[sa.Connection]:
        with self._engine.begin() as connection:
            limit_statements(connection, _STATEMENT_LIMIT_S, **WALKING)
            yield connection
