"""The relay's transactions: claim, renew, settle. Each is short, and none is open while the network is used."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outbox.relay import clock
from outbox.relay.batch import Batch
from outbox.relay.settling import FAILED, by_partition, settlements, write
from outbox.states import State
from outbox.store import claim, promote, settle
from outbox.store.dialects import limit_statements

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import sqlalchemy as sa

    from outbox.states import RetryPolicy, Verdict
    from outbox.tables import Tables

MOST_PARTITIONS = 16
_STATEMENT_LIMIT_S = 10.0
_PROMOTE_AT_ONCE = 1000


@dataclass(frozen=True, slots=True)
class Settled:
    """What was written down: messages by their new state, and how many were dropped because the relay was fenced."""

    states: Mapping[State, int]
    fenced: int


class Transactions:
    """The relay's view of the database. Every method is one transaction and may raise `SQLAlchemyError`.

    `owner` names the relay in `outbox_partition`; it must be new for every process start.
    """

    def __init__(
        self, engine: sa.Engine, tables: Tables, *, owner: str, lease_s: float, batch_size: int, policy: RetryPolicy
    ) -> None:
        self._engine = engine
        self._tables = tables
        self._owner = owner
        self._lease_s = lease_s
        self._batch_size = batch_size
        self._policy = policy

    def claim(self) -> Batch | None:
        """Promote what is due, lease some partitions and read what is unsent in them; `None` if there is nothing.

        A message whose key is held back by an earlier one is moved to `blocked` here, out of the way of later claims.
        """
        claimed_at = clock.seconds()
        with self._begin() as connection:
            promote.promote(connection, self._tables, most=_PROMOTE_AT_ONCE)
            leases = claim.lease_partitions(
                connection, self._tables, owner=self._owner, lease_s=self._lease_s, most=MOST_PARTITIONS
            )
            if not leases:
                return None
            rows = claim.unsent(connection, self._tables, leases, limit=-(-self._batch_size // len(leases)))
            if waiting := [row.id for row in rows if row.must_wait]:
                settle.block(connection, self._tables, waiting)
            return Batch(leases, [row for row in rows if not row.must_wait], claimed_at)

    def renew(self, leases: Mapping[int, int]) -> set[int]:
        """Prolong the leases; return the partitions that are still held."""
        with self._begin() as connection:
            return claim.renew(connection, self._tables, leases, lease_s=self._lease_s)

    def settle(self, batch: Batch, verdicts: Mapping[int, Verdict]) -> Settled:
        """Give the leases back and write down the outcomes, for those partitions alone that are still held.

        Safe to call again when it is not known whether it committed: the second time the leases are no longer held.
        """
        judged = settlements(batch.rows, verdicts, self._policy)
        with self._begin() as connection:
            held = settle.release(
                connection,
                self._tables,
                batch.leases,
                published=by_partition(judged, State.SENT),
                failed=by_partition(judged, *FAILED),
            )
            mine = [each for each in judged if each.row.partition in held]
            write(connection, self._tables, mine)
        return Settled(Counter(each.state for each in mine), fenced=len(judged) - len(mine))

    @contextmanager
    def _begin(self) -> Iterator[sa.Connection]:
        with self._engine.begin() as connection:
            limit_statements(connection, _STATEMENT_LIMIT_S)
            yield connection
