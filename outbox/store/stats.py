"""What stands in the tables, for people and monitoring. Reads only; locks nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import sqlalchemy as sa

from outbox.sqltypes import UtcDateTime, now
from outbox.states import State
from outbox.store.oldest import oldest_unsent_s

if TYPE_CHECKING:
    from outbox.tables import Tables

MOST_COUNTED = 10_000
"""How many messages of one state are counted: to count millions would take seconds, each time that somebody looks."""


@dataclass(frozen=True, slots=True)
class Held:
    """The partitions that one relay holds a live lease on, and how many seconds the shortest of them has left."""

    owner: str
    partitions: list[int]
    expires_in_s: float


@dataclass(frozen=True, slots=True)
class Stats:
    """One look at the outbox.

    `messages` counts by state, all states present, each up to `counted_up_to`: that number means so many or more.
    `oldest_unsent_s` is the age in seconds of the oldest message that should have been sent by now, or `None`; a message that
    the application delayed counts from when it was due. `published` and `failed` are totals since the tables were made;
    `failed` counts failed tries.
    """

    messages: dict[State, int]
    counted_up_to: int
    oldest_unsent_s: float | None
    leases: list[Held]
    published: int
    failed: int


def stats(connection: sa.Connection, tables: Tables) -> Stats:
    """Look at the outbox. Reads about ten thousand rows of each state at most, however many there are."""
    published, failed = connection.execute(
        sa.select(sa.func.sum(tables.partition.c.published), sa.func.sum(tables.partition.c.failed))
    ).one()
    return Stats(
        messages={state: count(connection, tables, state) for state in State},
        counted_up_to=MOST_COUNTED,
        oldest_unsent_s=oldest_unsent_s(connection, tables),
        leases=_leases(connection, tables),
        published=int(published or 0),  # PostgreSQL adds bigints up to a numeric
        failed=int(failed or 0),
    )


def count(connection: sa.Connection, tables: Tables, state: State, *, most: int | None = None) -> int:
    """Count the messages of a state, up to `most` (default: `MOST_COUNTED`).

    Walks the partial index of that state alone, in its order, which it is alone in having (but for the dead: that of the ids is
    also that of the primary key, which is larger).
    """
    message = tables.message
    # The literal lets the planner prove that the partial index covers the query.
    order = [message.c[name] for name in _ORDERS[state]]  # nothing else is selected, so that the index alone is read
    these = sa.select(*order).where(message.c.state == sa.literal_column(f"'{state}'"))
    some = these.order_by(*order).limit(most or MOST_COUNTED).subquery("some")
    return connection.execute(sa.select(sa.func.count()).select_from(some)).scalar_one()


_ORDERS = {
    State.SCHEDULED: ("available_at",),
    State.PENDING: ("partition", "id"),
    State.BLOCKED: ("topic", "id"),
    State.SENT: ("sent_at",),
    State.DEAD: ("id",),
}


def _leases(connection: sa.Connection, tables: Tables) -> list[Held]:
    partition = tables.partition
    rows = connection.execute(
        sa.select(
            partition.c.partition,
            partition.c.lease_owner,
            partition.c.lease_until,
            sa.type_coerce(now(), UtcDateTime()).label("clock"),
        )
        .where(partition.c.lease_until > now())
        .order_by(partition.c.lease_owner, partition.c.partition)
    ).all()
    owners = dict.fromkeys(row.lease_owner for row in rows)
    return [
        Held(
            owner=owner,
            partitions=[row.partition for row in rows if row.lease_owner == owner],
            expires_in_s=min(round((row.lease_until - row.clock).total_seconds(), 3) for row in rows if row.lease_owner == owner),
        )
        for owner in owners
    ]
