"""What stands in the tables, for people and monitoring. Reads only; locks nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import sqlalchemy as sa

from outbox.sqltypes import UtcDateTime, now
from outbox.states import State

if TYPE_CHECKING:
    from datetime import datetime

    from outbox.tables import Tables

UNSENT = (State.PENDING, State.BLOCKED, State.SCHEDULED)


@dataclass(frozen=True, slots=True)
class Held:
    """The partitions that one relay holds a live lease on, and how many seconds the shortest of them has left."""

    owner: str
    partitions: list[int]
    expires_in_s: float


@dataclass(frozen=True, slots=True)
class Stats:
    """One look at the outbox.

    `messages` counts by state, all states present. `oldest_unsent_s` is the age in seconds of the oldest message that should
    have been sent by now, or `None`; a message that the application delayed counts from when it was due. `published` and
    `failed` are totals since the tables were made; `failed` counts failed tries.
    """

    messages: dict[State, int]
    oldest_unsent_s: float | None
    leases: list[Held]
    published: int
    failed: int


def stats(connection: sa.Connection, tables: Tables) -> Stats:
    """Look at the outbox. Counts every row: seconds, not milliseconds, when millions wait."""
    counts, oldest, clock = _counts(connection, tables)
    published, failed = connection.execute(
        sa.select(sa.func.sum(tables.partition.c.published), sa.func.sum(tables.partition.c.failed))
    ).one()
    return Stats(
        messages={state: counts.get(state, 0) for state in State},
        oldest_unsent_s=None if oldest is None else max(0.0, round((clock - oldest).total_seconds(), 3)),
        leases=_leases(connection, tables),
        published=int(published or 0),  # PostgreSQL adds bigints up to a numeric
        failed=int(failed or 0),
    )


def _counts(connection: sa.Connection, tables: Tables) -> tuple[dict[str, int], datetime | None, datetime]:
    message = tables.message
    overdue = sa.or_(message.c.state.in_((State.PENDING, State.BLOCKED)), message.c.last_error.is_not(None))
    since = sa.case((message.c.last_error.is_(None), message.c.available_at), else_=message.c.created_at)
    oldest = sa.func.min(sa.case((overdue, since)), type_=UtcDateTime())
    rows = connection.execute(
        sa.select(message.c.state, sa.func.count().label("number"), oldest.label("oldest")).group_by(message.c.state)
    ).all()
    clock = connection.execute(sa.select(sa.type_coerce(now(), UtcDateTime()))).scalar_one()
    times = [row.oldest for row in rows if row.state in UNSENT and row.oldest is not None]
    return {row.state: row.number for row in rows}, min(times, default=None), clock


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
